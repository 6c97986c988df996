"""From a checkpoint in the middle of an epoch a run goes on to the last bit, if its loader can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced

STRATEGIES = {
    "ddp": lambda: DDPStrategy(),
    "fsdp": lambda: FSDPStrategy(),
    "mesh": lambda: MeshStrategy(pp=2),
    "1f1b": lambda: PipelineStrategy(schedule="1f1b"),
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
    "pipedream_2bw": lambda: PipelineStrategy(schedule="pipedream_2bw"),
}
BATCH_SIZE = 4
NUM_BATCHES = 5  # of each rank's own, or of all ranks' same ones
SAVED_AT = 3


class Continued:
    """A loader that says where it is and goes on from there, as torchdata's does."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        samples = make_data(NUM_BATCHES * BATCH_SIZE * num_replicas)
        self.x, self.y = (part[rank::num_replicas].split(BATCH_SIZE) for part in samples.tensors)
        self.position = 0
        self.first = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position, self.first = self.first, 0
        while self.position < NUM_BATCHES:
            self.position += 1
            yield self.x[self.position - 1], self.y[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["position"]


def train(name: str, folder: str, resume: str | None) -> tuple[dict[str, Tensor], list[float]]:
    module = make_module(Synced, optimizer="adamw", schedule_lr=True)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    trainer = make_trainer(
        devices=2,
        strategy=STRATEGIES[name](),
        max_epochs=2,
        callbacks=[saves],
        enable_checkpointing=True,
    )
    losses: list[float] = []
    module.on_validation_start = lambda: losses.append(trainer.callback_metrics["train_loss"])
    place = trainer.strategy.distributed_sampler_kwargs
    trainer.fit(module, Continued(**place), Continued(**place), ckpt_path=resume, weights_only=True)
    return state_of(module), [float(loss) for loss in losses]


@pytest.mark.some("1f1b", "pipedream")
@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_the_uninterrupted_run(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    whole: Any = workers.run(2, train, name, str(tmp_path), None)
    resumed: Any = workers.run(2, train, name, str(tmp_path), f"{tmp_path}/step={SAVED_AT}.ckpt")
    for (state, losses), (resumed_state, resumed_losses) in zip(whole, resumed, strict=True):
        assert resumed_losses[-1] == losses[-1]
        assert resumed_state.keys() == state.keys()
        for key, value in state.items():
            assert bool((resumed_state[key] == value).all()), key

"""From a checkpoint in the middle of an epoch a run goes on to the last bit, if its loader can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import make_module, make_trainer, state_of
from tests.helpers.networks.resumable_loader import ResumableLoader
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
    train_loader, val_loader = (ResumableLoader(NUM_BATCHES, BATCH_SIZE, **place) for _ in range(2))
    trainer.fit(module, train_loader, val_loader, ckpt_path=resume, weights_only=True)
    return state_of(module), [float(loss) for loss in losses]


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_the_uninterrupted_run(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    whole: Any = workers.run(2, train, name, str(tmp_path), None)
    resumed: Any = workers.run(2, train, name, str(tmp_path), f"{tmp_path}/step={SAVED_AT}.ckpt")
    for (state, losses), (resumed_state, resumed_losses) in zip(whole, resumed, strict=True):
        assert resumed_losses[-1] == losses[-1]
        assert resumed_state.keys() == state.keys()
        for key, value in state.items():
            assert bool((resumed_state[key] == value).all()), key

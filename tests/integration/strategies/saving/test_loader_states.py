"""Each replica's loader goes on where it was, though replicas are elsewhere in other shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import make_data, make_layers, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

STEPS, SAVED = 6, 3
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "ddp": (2, DDPStrategy),
    "fsdp": (2, FSDPStrategy),
    "stages": (4, lambda: PipelineStrategy(num_stages=2, num_microbatches=2)),
    "mesh": (4, lambda: MeshStrategy(pp=2, dp_shard=2)),
}


class ShardReader:
    """Batches of four samples from shards whose lengths differ; knows where it is."""

    def __init__(self, replica: int) -> None:
        x, y = make_data(120).tensors
        # The first replica's shards are short, the other's long: their places differ in each batch.
        sizes = [2, 3, 5, 20, 30] if replica == 0 else [40, 20]
        own = slice(60 * replica, 60 * (replica + 1))
        self.shards = list(zip(x[own].split(sizes), y[own].split(sizes), strict=True))
        self.place = [0, 0]

    def __len__(self) -> int:  # Lightning reads ahead where it does not know the length
        return 15

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            taken: list[tuple[Tensor, Tensor]] = []
            while len(taken) < 4 and self.place[0] < len(self.shards):
                shard, offset = self.place
                x, y = self.shards[shard]
                taken.append((x[offset], y[offset]))
                self.place = [shard, offset + 1] if offset + 1 < len(x) else [shard + 1, 0]
            if len(taken) < 4:
                return
            xs, ys = zip(*taken, strict=True)
            yield torch.stack(xs), torch.stack(ys)

    def state_dict(self) -> dict[str, Any]:
        return {"place": list(self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = list(state["place"])


class Save(L.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


class Recording(L.LightningModule):
    """Notes which samples each batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_layers()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning sets up the loader for this, ahead of what a checkpoint says of it.
        assert self.trainer.estimated_stepping_batches == STEPS
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].double().sum()))


def train(name: str, folder: str, resume: str | None) -> tuple[dict[str, Tensor], list[float]]:
    num_ranks, make = STRATEGIES[name]
    strategy = make()
    trainer = make_trainer(
        devices=num_ranks,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[] if resume else [Save(f"{folder}/saved.ckpt")],
        barebones=False,
    )
    torch.manual_seed(7)
    module = Recording().double()

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> ShardReader:
            return ShardReader(strategy.distributed_sampler_kwargs["rank"])

    trainer.fit(module, datamodule=Data(), ckpt_path=resume)
    return state_of(module), module.seen


@pytest.mark.some("ddp")
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_run_resumed_inside_of_an_epoch_reads_on(
    workers: WorkerPool, name: str, tmp_path: Path
) -> None:
    num_ranks, _ = STRATEGIES[name]
    whole = workers.run(num_ranks, train, name, str(tmp_path), None)
    saved = str(tmp_path / "saved.ckpt")
    resumed = workers.run(num_ranks, train, name, str(tmp_path), saved)
    assert whole[0][1] != whole[-1][1]  # replicas read other samples
    for (expected, seen), (found, seen_again) in zip(whole, resumed, strict=True):
        assert seen_again == seen[SAVED:]
        assert all(torch.equal(found[key], value) for key, value in expected.items())

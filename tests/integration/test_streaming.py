"""A run on a stream that was stopped inside of an epoch equals one that was not, bit for bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from recipes.gpt import GPT
from recipes.streaming import shards
from recipes.streaming.data import TokenStreamDataModule
from recipes.streaming.shards import write_shards
from recipes.text import load_text
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.test_recipes import run_in_pool

CONFIG = Path("recipes/configs/stream_gpt.yaml")
LENGTH, BATCH = 16, 16
PLAN = {
    "model.*.token": "vocab",
    "model.*.attention.qkv": "colwise",
    "model.*.attention.out": "rowwise",
    "model.*.up": "colwise",
    "model.*.down": "rowwise",
    "model.*.logits": "colwise_gather",
}
# Processes, workers of a reader, and the strategy.
STRATEGIES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "ddp": (2, 0, DDPStrategy),
    "ddp_workers": (2, 2, DDPStrategy),
    "fsdp": (2, 0, FSDPStrategy),
    "pipedream": (2, 0, lambda: PipelineStrategy(schedule="pipedream")),
    "1f1b": (2, 2, lambda: PipelineStrategy(num_microbatches=2)),
    "tensor": (2, 0, lambda: TensorParallelStrategy(plan=PLAN)),
    "mesh": (4, 0, lambda: MeshStrategy(pp=2, dp_shard=2)),
}


class Save(L.Callback):
    """Notes which tokens each batch has, and saves in the middle of the second epoch."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.seen: list[int] = []
        self.saved_at = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.seen.append(int((batch[0] * torch.arange(batch[0].numel()).view_as(batch[0])).sum()))
        if self.path and trainer.current_epoch == 1 and index == 1:
            self.saved_at = len(self.seen)
            trainer.save_checkpoint(self.path)


Trained = tuple[dict[str, Tensor], list[int], int]


def train(name: str, folder: str, saves: str | None, resumes: str | None) -> Trained:
    num_ranks, num_workers, make = STRATEGIES[name]
    save = Save(saves)
    trainer = make_trainer(
        devices=num_ranks,
        strategy=make(),
        max_epochs=2,
        limit_val_batches=0,
        callbacks=[save],
        use_distributed_sampler=True,
    )
    torch.manual_seed(7)
    module = GPT(width=16, depth=2, num_heads=2, warmup_steps=1)
    data = TokenStreamDataModule(
        folder, BATCH, sequence_length=LENGTH, window=16, num_workers=num_workers
    )
    # The processes that the tests run in were spawned, and would spawn workers in their turn.
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resumes)
    finally:
        multiprocessing.set_start_method(before, force=True)
    return state_of(module), save.seen, save.saved_at


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_resumed_run_equals_one_that_was_not_stopped(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "load_text", lambda: load_text()[:3000])
    list(write_shards(tmp_path / "shards", LENGTH, 4))
    num_ranks, *_ = STRATEGIES[name]
    saved = str(tmp_path / "saved.ckpt")
    whole = workers.run(num_ranks, train, name, str(tmp_path / "shards"), saved, None)
    resumed = workers.run(num_ranks, train, name, str(tmp_path / "shards"), None, saved)
    for (expected, seen, at), (found, seen_again, _) in zip(whole, resumed, strict=True):
        assert 0 < at < len(seen)
        assert seen_again == seen[at:]
        assert len(set(seen)) == len(seen)  # the second epoch has another order
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    replicas = {tuple(seen) for _, seen, _ in whole}
    assert len(replicas) == (2 if name in ("ddp", "ddp_workers", "fsdp", "mesh") else 1)


@pytest.mark.long
def test_the_recipe_trains(workers: WorkerPool, tmp_path: Path) -> None:
    logger = f"--trainer.logger.init_args.save_dir={tmp_path}"
    folder = f"--data.init_args.folder={tmp_path / 'shards'}"
    limits = [f"--trainer.limit_{name}_batches=2" for name in ("train", "val")]
    few = ["--trainer.max_epochs=1", "--data.init_args.num_workers=0", *limits]
    arguments = ["fit", f"--config={CONFIG}", *few, logger, folder]
    output, _ = workers.run(2, run_in_pool, arguments)
    assert "8 shards of 409 rows" in output
    assert "bits per byte" in output
    assert "bubble fraction" in output

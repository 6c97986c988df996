"""Parameters that stages share train as on one device where each stage is sharded, too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from lightning_dist import MeshStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.parity.test_tied import (
    OPTIONS,
    KeepsGradients,
    TiedText,
    assert_equal_to,
    loader,
    tied_layers,
)

ODD, EVEN = 11, 12  # rows of the embedding: shards of two sizes, or pieces of one
# The blocks share a weight that is whole, and each rank finds a summand of its gradient.
PLAN = {"model.0": "vocab", "model.7": "colwise_gather", "model.*.linear": "replicate"}
SPREAD = TensorConfig(PLAN, sequence_parallel=True)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (ODD, {"dp_replicate": 2, "dp_shard": 1, "meta_init": False}),
    "tensor ranks": (EVEN, {"dp_shard": 1, "tp": 2, "tensor": SPREAD}),
}
SHARDS: tuple[int, dict[str, Any]] = (ODD, {"dp_shard": 2})


class BuiltLater(TiedText):
    """Builds its layers where the strategy can do so without their memory."""

    def __init__(self, words: int) -> None:
        L.LightningModule.__init__(self)
        self.words = words

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(7)
            self.model = tied_layers(self.words).double()


class KeepsLater(BuiltLater, KeepsGradients):
    """Clears gradients before each second update only."""


def fit(
    words: int,
    mesh: dict[str, Any] | None,
    resume: str | None = None,
    save: str | None = None,
    kind: type[BuiltLater] = BuiltLater,
) -> dict[str, Tensor]:
    """Trains for two epochs, from a checkpoint after the first or from the start."""
    module = kind(words)
    strategy: Any = "auto"
    if mesh is not None:
        pipeline = PipelineConfig(partition="uniform", num_microbatches=2)
        strategy = MeshStrategy(pp=2, pipeline=pipeline, **mesh)
    own = None if mesh is None else strategy
    devices = 1 if mesh is None else 4
    epochs = 1 if save else 2
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=epochs, **OPTIONS)
    trainer.fit(module, loader(own), loader(own), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


@cache
def single_device(words: int) -> dict[str, Tensor]:
    return fit(words, None)


@pytest.mark.some("tensor ranks")
@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_device(workers: WorkerPool, name: str) -> None:
    assert_equal_to(single_device(CASES[name][0]), workers.run(4, fit, *CASES[name]))


def fit_keeping(words: int, mesh: dict[str, Any] | None) -> dict[str, Tensor]:
    return fit(words, mesh, kind=KeepsLater)


def test_gradients_kept_over_updates_count_once(workers: WorkerPool) -> None:
    words, mesh = CASES["tensor ranks"]  # each sums over other ranks than the stages
    assert_equal_to(fit_keeping(words, None), workers.run(4, fit_keeping, words, mesh))


def save_and_resume(path: str) -> dict[str, Tensor]:
    fit(*SHARDS, save=path)
    return fit(*SHARDS, resume=path)


def test_shards_equal_a_single_device_and_a_checkpoint_has_one_copy(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "shards.ckpt")
    assert_equal_to(single_device(ODD), workers.run(4, save_and_resume, path))
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"model.model.0.weight", "optimizer.0.model.0.weight.exp_avg"} <= set(keys)
    assert not any("model.7.weight" in key for key in keys)
    merged = str(tmp_path / "merged.ckpt")
    torch.save(load_full(path), merged)
    assert_equal_to(single_device(ODD), [fit(ODD, None, resume=merged)])

"""Half precision follows a plain loop bit for bit, under each strategy."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import DDPStrategy, PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from tests.helpers.half_reference import Reference, half_weights, keep_norms, one_thread
from tests.helpers.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.oracle import train_sequentially
from tests.helpers.workers import WorkerPool

BF16 = torch.bfloat16
NUM_SAMPLES = 40


class Recorded(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        assert logits.dtype == torch.float32
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def fit(strategy: Any, devices: int, loader: Any, **options: Any) -> dict[str, Tensor]:
    module = make_module(Recorded).float()
    trainer = make_trainer(
        devices=devices, strategy=strategy, callbacks=[MixedPrecision()], **options
    )
    trainer.fit(module, loader, make_loader(8))
    return state_of(module)


def reference(num_microbatches: int = 1) -> dict[str, Tensor]:
    module = make_module(Recorded).float()
    with one_thread():
        loop = Reference(
            module.model,
            make_optimizer("sgd", module.parameters()),
            num_microbatches=num_microbatches,
        )
        for batch in make_loader(NUM_SAMPLES):
            loop.step([batch])
    return state_of(module)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), (name, (actual[name] - value).abs().max())


def test_single(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert_equal(fit("auto", 1, make_loader(NUM_SAMPLES)), reference())


def on_pipeline(schedule: str, **options: Any) -> dict[str, Tensor]:
    strategy = PipelineStrategy(schedule=schedule, partition="uniform", **options)
    return fit(strategy, 2, make_loader(NUM_SAMPLES))


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_sync(workers: WorkerPool, schedule: str) -> None:
    assert_equal(joined(workers.run(2, on_pipeline, schedule)), reference(8))


def on_pipedream(versions: str) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    strategy = PipelineStrategy(schedule="pipedream", partition="uniform", weight_versions=versions)
    state = fit(strategy, 2, make_loader(NUM_SAMPLES), max_epochs=2)
    return state, strategy.peak_stash_bytes


def oracle(versions: str) -> dict[str, Tensor]:
    model = make_module(Recorded).float().model
    stages = [model[:4], model[4:]]
    keep_norms(model)
    optimizers = [make_optimizer("sgd", stage.parameters()) for stage in stages]
    batches = [(x.to(BF16), y) for x, y in make_loader(NUM_SAMPLES)] * 2

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y)

    with one_thread():
        train_sequentially(
            stages,
            optimizers,
            batches,
            loss,
            (0, 5),
            versions,
            copy=lambda m: half_weights(m, BF16),
        )
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("versions", ["stash", "vertical_sync"])
def test_pipedream(workers: WorkerPool, versions: str) -> None:
    parts = workers.run(2, on_pipedream, versions)
    assert_equal(joined([state for state, _ in parts]), oracle(versions))
    first, second = (
        sum(p.numel() * (4 if "norm" in n else 2) for n, p in state.items()) for state, _ in parts
    )
    assert [stash for _, stash in parts] == 2 * [(first, second * (versions == "vertical_sync"))]


def on_ddp() -> dict[str, Tensor]:
    return fit(DDPStrategy(), 2, share_of(int(os.environ["RANK"]), NUM_SAMPLES))


def test_ddp(workers: WorkerPool) -> None:
    module = make_module(Recorded).float()
    with one_thread():
        loop = Reference(module.model, make_optimizer("sgd", module.parameters()))
        for batches in zip(*(share_of(rank, NUM_SAMPLES) for rank in range(2)), strict=True):
            loop.step(batches)
    for found in workers.run(2, on_ddp):
        assert_equal(found, state_of(module))

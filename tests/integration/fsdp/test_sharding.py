"""What FSDP2 does with users' modules, and what travels."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_dist import FSDPStrategy
from lightning_dist.engine.tensors.dtensor import is_dtensor, local_part
from lightning_dist.wrap import AnyOf, ByClass, ByName, BySize
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import assert_close

NUM_SAMPLES = 44


class Odd(Classifier):
    """Tied and frozen parameters, one of its own, a layer without any, two forwards per step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model[3].linear = self.model[1].linear
        self.model[2].conv.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.scale * self.model(x) + self.model(x.flip(0)).flip(0)
        loss = F.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits.detach()}


class Unit(nn.Module):
    """A block within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ConvLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(Unit(), Unit(), nn.Flatten(), nn.Linear(12, 3))


class ShardsItself(Classifier):
    """Calls ``fully_shard`` in ``configure_model``."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDPStrategy):
            for layer in self.model[:6]:
                fully_shard(layer, mesh=self.trainer.strategy.device_mesh)


class Wide(nn.Module):
    """A block with several layers that can be units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """A whole model inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.Sequential(Wide(), Wide(), Wide())
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x.flatten(1))))


class Layered(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Deep()


MODULES = {
    "layered": Layered,
    "odd": Odd,
    "nested": Nested,
    "manual": ShardsItself,
    "plain": Classifier,
}


def fit(name: str, options: dict[str, Any] | None, accumulate: int = 1) -> Any:
    module = make_module(MODULES[name])
    if options is None:
        trainer = make_trainer(devices=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, make_loader(NUM_SAMPLES), make_loader(8))
        return state_of(module), []
    strategy = FSDPStrategy(**options)
    trainer = make_trainer(devices=2, strategy=strategy, accumulate_grad_batches=accumulate)
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    assert all(is_dtensor(p) for p in module.parameters())
    units = [n for n, m in module.named_modules() if isinstance(m, FSDPModule)]
    return state_of(module), units


SEL = "selective"
BLOCKS = [f"model.{i}" for i in range(6)]


@pytest.mark.some(
    "odd-options0-units0",
    "plain-options4-units4",
    "nested-options5-units5",
    "manual-options6-units6",
    "layered-options8-None",
)
@pytest.mark.parametrize(
    ("name", "options", "units"),
    [
        # Blocks 1 and 3 share a layer, so that only the root has all of it.
        ("odd", {}, ["model.0", "model.2", "model.4", "model.5"]),
        ("odd", {"reshard_after_forward": False, "activation_checkpointing": "full"}, None),
        ("plain", {"wrap": ByName(["model.[01]", "model.7"])}, ["model.0", "model.1", "model.7"]),
        ("plain", {"wrap": BySize(60), "activation_checkpointing": "selective"}, None),
        ("plain", {"offload": "cpu", "activation_checkpointing": ["Linear"]}, BLOCKS),
        (
            "nested",
            {
                "wrap": AnyOf([ByClass(["Unit"]), ByClass(["ConvLayer"])]),
                "activation_checkpointing": "full",
            },
            ["model.0", "model.0.layers.0", "model.0.layers.1"]
            + ["model.1", "model.1.layers.0", "model.1.layers.1"],
        ),
        ("manual", {"wrap": "manual"}, BLOCKS),
        # Units inside of what is computed again are not gathered alike both times.
        ("layered", {"wrap": ByClass(["Deep", "Wide"]), "activation_checkpointing": SEL}, None),
        ("layered", {"wrap": BySize(1), "activation_checkpointing": SEL}, None),
        ("layered", {"wrap": ByClass(["Deep", "Linear"]), "activation_checkpointing": SEL}, None),
    ],
)
def test_equals_a_single_device(
    workers: WorkerPool,
    name: str,
    options: dict[str, Any],
    units: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, _ = fit(name, None)
    for state, found in workers.run(2, fit, name, options):
        assert_close(state, expected)
        assert units is None or found == units


def fit_compiled() -> dict[str, Tensor]:
    compiler = torch.compile
    torch.compile = partial(compiler, backend="aot_eager")  # the other one needs half a minute
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            options = {"compile": True, "activation_checkpointing": "full"}
            return fit("plain", {"wrap": ByName(["model.0"]), **options})[0]
    finally:
        torch.compile = compiler


@pytest.mark.long  # test_compiled_units.py compares compiled ones, too
def test_compiled_units_equal_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, _ = fit("plain", None)
    for state in workers.run(2, fit_compiled):
        assert_close(state, expected)


def count_reductions(options: dict[str, Any]) -> int:
    """Counts the reduce-scatters of eight micro-steps, two units and two optimizer steps."""
    # FSDP2 calls the one or the other, by the version of torch.
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    name = next(name for name in names if hasattr(dist, name))
    count, original = 0, getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    strategy = FSDPStrategy(wrap=ByName(["model.0"]), **options)
    trainer = make_trainer(devices=2, strategy=strategy, accumulate_grad_batches=4)
    setattr(dist, name, counting)
    try:
        trainer.fit(make_module(), share_of(int(os.environ["RANK"]), 64), make_loader(8))
    finally:
        setattr(dist, name, original)
    assert trainer.global_step == 2
    return count


def test_accumulation_reduces_once_per_step(workers: WorkerPool) -> None:
    units, steps, microsteps = 2, 2, 8
    assert workers.run(2, count_reductions, {}) == [units * steps] * 2
    every = workers.run(2, count_reductions, {"sync_every_microstep": True})
    assert every == [units * microsteps] * 2


def local_numbers(shard_size: int) -> tuple[int, int, str]:
    module = make_module()
    strategy = FSDPStrategy(shard_size=shard_size)
    trainer = make_trainer(devices=4, strategy=strategy, max_steps=1)
    trainer.fit(module, make_loader(16, 4), make_loader(8))
    (optimizer,) = trainer.optimizers
    own = sum(local_part(p).numel() for p in module.parameters())
    momenta = sum(local_part(s["momentum_buffer"]).numel() for s in optimizer.state.values())
    return own, momenta, str(strategy.describe())


@pytest.mark.some("4")
@pytest.mark.parametrize("shard_size", [2, 4])
def test_each_rank_holds_its_share(workers: WorkerPool, shard_size: int) -> None:
    total = sum(p.numel() for p in make_module().parameters())
    ranks = workers.run(4, local_numbers, shard_size)
    assert sum(own for own, _, _ in ranks) == total * 4 // shard_size
    assert [own for own, _, _ in ranks] == [momenta for _, momenta, _ in ranks]
    for _, _, text in ranks:
        assert "ConvLayer" in text
        assert "6" in text

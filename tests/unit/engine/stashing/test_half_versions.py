"""Versions in half precision take two bytes per parameter, and nobody copies a master."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.stashing.half_versions import CastWeights, HalfWeights
from lightning_dist.engine.stashing.versions import Stashed, WeightVersion, version_bytes
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank
from tests.helpers.half_reference import Reference
from tests.helpers.networks.models import make_optimizer
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

BF16, FP32 = torch.bfloat16, torch.float32


def is_kept(parameter: Tensor) -> bool:
    return parameter.ndim == 1


def half(**options: Any) -> HalfWeights:
    return HalfWeights(lambda p: FP32 if is_kept(p) else BF16, **options)


def test_a_rank_counts_its_part_of_what_is_spread() -> None:
    layer = nn.Linear(4, 4)
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        assert version_bytes(layer.parameters()) == 2 * 4 * 4 + 4 * 4
        assert version_bytes(layer.parameters(), half().dtype_of) == 2 * 4 * 2 + 4 * 4


def test_a_version_is_the_cast() -> None:
    module = nn.Linear(2, 2)
    master = module.weight.data_ptr()
    store = Stashed(CastWeights(module.named_parameters(), half()))
    version = store.acquire()
    weight, bias = version.aliases["weight"], version.aliases["bias"]
    assert (weight.dtype, bias.dtype) == (BF16, FP32)
    assert weight.is_leaf
    assert weight.requires_grad
    before = (weight.clone(), bias.clone())
    store.before_step()
    assert module.weight.data_ptr() == master
    for parameter in module.parameters():
        parameter.data.add_(1.0)
    assert torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])
    assert store.stash_bytes == 2 * 4 + 4 * 2
    assert torch.equal(store.acquire().aliases["weight"], module.weight.to(BF16))
    store.release(version)
    assert store.stash_bytes == 0


def test_what_was_trained_and_is_frozen_again_has_its_last_values() -> None:
    module = nn.Linear(2, 2)
    store = Stashed(CastWeights(module.named_parameters(), half()))
    for is_trained in (False, True, False):
        module.weight.requires_grad_(is_trained)
        version = store.acquire()
        assert torch.equal(version.aliases["weight"], module.weight.to(BF16))
        store.release(version)
        store.before_step()
        if is_trained:
            module.weight.data.add_(1.0)


def test_in_the_graph_gradients_come_to_the_masters() -> None:
    module = nn.Linear(2, 2)
    store = Stashed(CastWeights(module.named_parameters(), half(is_in_graph=True)))
    for _ in range(2):  # the same version twice
        aliases = store.acquire().aliases
        F.linear(torch.ones(1, 2, dtype=BF16), aliases["weight"]).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 2), 2.0))


def test_nothing_is_held_while_nobody_computes() -> None:
    store = Stashed(CastWeights(nn.Linear(2, 2).named_parameters(), half()))
    version = store.acquire()
    alive = weakref.ref(version)
    store.release(version)
    store.before_step()
    del version
    gc.collect()
    assert alive() is None


def test_others_may_write_to_the_masters_where_nothing_is_in_flight() -> None:
    module = nn.Linear(2, 2)
    store = Stashed(CastWeights(module.named_parameters(), half()))
    store.release(store.acquire())
    module.weight.data.fill_(3.0)
    assert bool((store.look().aliases["weight"] == 3.0).all())
    store.restart()
    assert bool((store.acquire().aliases["weight"] == 3.0).all())


def test_frozen_weights_are_cast_once() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    store = Stashed(CastWeights(module.named_parameters(), half()))
    first = store.acquire()
    store.before_step()
    second = store.acquire()
    assert first.aliases["weight"] is second.aliases["weight"]
    assert first.aliases["bias"] is not second.aliases["bias"]
    assert not first.aliases["weight"].requires_grad
    assert store.stash_bytes == 4 * 2


def watch(policy: Stashed) -> Callable[[], int]:
    """Counts the copies that a stage has computed with and that still take memory."""
    seen: dict[int, weakref.ref[Tensor]] = {}
    acquire = policy.acquire

    def acquire_watched() -> WeightVersion:
        version = acquire()
        for alias in version.aliases.values():
            seen[id(alias)] = weakref.ref(alias)
        return version

    policy.acquire = acquire_watched  # type: ignore[method-assign]
    return lambda: sum(ref() is not None for ref in seen.values())


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_a_stage_holds_as_many_copies_as_it_has_versions(schedule: str) -> None:
    num_stages = 3

    def train(model: nn.Sequential, pipeline: Pipeline) -> tuple[int, dict[int, int]]:
        own = list(model.parameters())
        masters = [p.data_ptr() for p in own]
        optimizer = torch.optim.SGD(own, lr=0.1)
        (stage,) = pipeline.stages.values()
        num_copies, most = watch(stage.policy), 0

        def update() -> int:
            optimizer.zero_grad()
            pipeline.install_gradients()
            assert all(p.grad is not None and p.grad.dtype == FP32 for p in own)
            with pipeline.updating():
                optimizer.step()
                return num_copies()

        def step(microbatch: Any) -> Tensor:
            return model(microbatch.content.to(BF16)).float().square().mean()

        for _ in range(6):
            pipeline.train_batch(torch.ones(4, 8), step)
            most = max(most, update() if pipeline.has_gradients else 0)
        for _ in pipeline.drain():
            update()
        assert num_copies() == 0
        assert [p.data_ptr() for p in own] == masters, "a master has moved"
        return most, pipeline.stages.peak_stash_bytes

    found = run_ranks(
        lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_stages))),
        shapes_of(schedule, 4 if schedule == "1f1b" else 1, (1, 1, 1), num_stages),
        train,
        half=half(),
        gradients=lambda _: HeldGradients(FP32),
    )
    behind = [num_stages - 1 - s if schedule == "pipedream" else 0 for s in range(num_stages)]
    assert found == [(n, {s: n * 2 * 64}) for s, n in enumerate(behind)]


class Layer(nn.Linear):
    """Loses its activations between forward and backward, if asked to."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return x + torch.tanh(nn.Linear.forward(self, x))

        return checkpoint(run, x, use_reentrant=False) if self.recomputes else run(x)


class Recomputed(Layer):
    recomputes = True


def make(layer: type[Layer]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer() for _ in range(8)))


def half_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x.to(BF16)).float(), y)


BATCHES = [
    (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 6)
    for i in range(3)
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_synchronous_schedules_follow_the_loop(schedule: str, accumulate: int) -> None:
    stages = (2, 2, 2, 2) if schedule in ("interleaved_1f1b", "zbv") else (4, 4)
    train = train_with(partial(make_optimizer, "sgd"), BATCHES, half_loss, accumulate)
    found = run_ranks(
        partial(make, Recomputed),
        shapes_of(schedule, 4, stages),
        train,
        half=HalfWeights(lambda _: BF16),
        gradients=lambda _: HeldGradients(FP32),
    )
    model = make(Layer)
    loop = Reference(
        model, make_optimizer("sgd", model.parameters()), BF16, 4, accumulate=accumulate
    )
    for batch in BATCHES:
        loop.step([batch])
    state = {name: value for part in found for name, value in part.items()}
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        # Micro-batches of a stage come in another order here and there.
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-7)

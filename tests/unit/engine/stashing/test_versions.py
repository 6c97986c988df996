from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_dist.engine.stashing.policy import Newest
from lightning_dist.engine.stashing.versions import ComputeWeights, Stashed


def store_of(module: nn.Module, max_age: int = 0) -> Stashed:
    return Stashed(ComputeWeights(module.named_parameters()), max_age)


def num_live_versions(store: Stashed) -> int:
    """Counts those whose memory is held, the newest included."""
    return 1 + store.stash_bytes // store.version_bytes


def test_a_version_keeps_its_values_and_costs_one_copy() -> None:
    module = nn.Linear(2, 2)
    store = store_of(module)
    version = store.acquire()
    before = module.weight.detach().clone()
    assert version.aliases["weight"].data_ptr() == module.weight.data_ptr()
    store.before_step()
    module.weight.data.add_(1.0)
    assert torch.equal(version.aliases["weight"], before)
    assert num_live_versions(store) == 2
    assert store.stash_bytes == store.peak_stash_bytes == 4 * (4 + 2)
    store.release(version)
    assert store.stash_bytes == 0


def test_nothing_is_copied_when_nobody_looks() -> None:
    module = nn.Linear(2, 2)
    store, place = store_of(module), module.weight.data_ptr()
    for _ in range(3):
        store.release(store.acquire())
        store.before_step()
    assert module.weight.data_ptr() == place
    assert (store.num_steps, store.peak_stash_bytes) == (3, 0)


def test_users_of_one_version_share_it() -> None:
    store = store_of(nn.Linear(2, 2))
    first, second = store.acquire(), store.acquire()
    assert first is second
    store.before_step()
    store.release(first)
    assert num_live_versions(store) == 2
    store.release(second)
    assert num_live_versions(store) == 1


@pytest.mark.parametrize("max_age", [0, 1])
def test_what_is_unfrozen_is_trained_from_the_next_forward_on(max_age: int) -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    store = store_of(module, max_age)
    before = store.acquire()
    if max_age:
        store.before_step()  # the next forward takes the same version
    module.weight.requires_grad_()
    after = store.acquire()
    assert [v.aliases["weight"].requires_grad for v in (before, after)] == [False, True]
    assert before.aliases["weight"].data_ptr() == after.aliases["weight"].data_ptr()
    assert before.index == after.index == 0
    store.before_step()
    module.weight.data.fill_(9.0)
    assert 9.0 not in after.aliases["weight"]
    store.release(before)
    assert num_live_versions(store) == 2 + max_age
    store.release(after)
    assert num_live_versions(store) == 1 + max_age


def test_forwards_stay_behind_by_some_steps() -> None:
    module = nn.Linear(2, 2)
    store = store_of(module, max_age=2)
    seen, held = [], []
    for step in range(5):
        module.weight.data.fill_(float(step))
        version = store.acquire()
        seen.append(float(version.aliases["weight"].detach()[0, 0]))
        store.release(version)
        store.before_step()
        held.append(num_live_versions(store))
    assert seen == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert held == [2, 3, 3, 3, 3]
    store.restart()
    assert store.stash_bytes == 0
    module.weight.data.fill_(9.0)
    assert float(store.acquire().aliases["weight"].detach()[0, 0]) == 9.0


def test_a_version_in_use_outlives_its_age() -> None:
    module = nn.Linear(2, 2)
    store = store_of(module, max_age=1)
    first = store.acquire()
    for _ in range(3):
        store.before_step()
        module.weight.data.add_(1.0)
    store.restart()
    assert num_live_versions(store) == 2
    assert not bool((first.aliases["weight"] == module.weight).any())
    store.release(first)
    assert num_live_versions(store) == 1


def test_trained_weights_alone_are_copied_to_be_remembered() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    store = Newest(ComputeWeights(module.named_parameters()), remembers=True)
    before, seen = module.weight.detach().clone(), store.acquire().seen
    assert seen["bias"].data_ptr() == module.bias.data_ptr()
    module.weight.data.add_(1.0)
    assert torch.equal(seen["weight"], before)


def test_released_memory_is_free() -> None:
    store = store_of(nn.Linear(2, 2))
    version = store.acquire()
    store.before_step()
    alive = weakref.ref(version)
    store.release(version)
    del version
    gc.collect()
    assert alive() is None


def test_a_frozen_parameter_is_never_copied() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    store = store_of(module)
    version = store.acquire()
    store.before_step()
    assert version.aliases["weight"].data_ptr() == module.weight.data_ptr()
    assert not version.aliases["weight"].requires_grad
    assert store.stash_bytes == 4 * 2


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 2, 3, padding=1), nn.LayerNorm(4), nn.Linear(4, 4)])
def test_the_backward_sees_the_weights_of_its_forward(layer: nn.Module) -> None:
    layer.double()
    store = store_of(layer)
    x = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    version = store.acquire()
    loss = torch.func.functional_call(layer, dict(version.aliases), (x,)).square().sum()
    store.before_step()
    for parameter in layer.parameters():
        parameter.data.mul_(3.0)
    (actual,) = torch.autograd.grad(loss, x)
    assert torch.equal(actual, expected)

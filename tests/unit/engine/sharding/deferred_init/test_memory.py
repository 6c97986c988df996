from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from tests.unit.engine.sharding.deferred_init.ordinary import (
    SEED,
    Holder,
    init_weights,
)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the real storages that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return returned


def test_the_peak_is_one_parameter() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 64)).apply(
            init_weights
        )

    with LiveBytes() as live, deferred_init() as tape:
        model = build()
    assert live.peak == 64 * 32 * 4  # for the generator to move on
    tensors = named_tensors(model)
    with LiveBytes() as live:
        for tensor in tensors.values():
            assert tape.materialize(tensor).shape == tensor.shape
    assert live.peak == 64 * 32 * 4
    held = []
    with LiveBytes() as live:
        held += [tape.materialize(tensor) for tensor in tensors.values()]
    assert live.peak == sum(tensor.nbytes for tensor in held)  # the count sees what is held


@pytest.mark.parametrize("init", [nn.init.trunc_normal_, nn.init.orthogonal_])
def test_the_peak_does_not_grow_with_the_model(init: Callable[[Tensor], Any]) -> None:
    def peaks(depth: int) -> tuple[int, int]:
        torch.manual_seed(SEED)
        with LiveBytes() as recording, deferred_init() as tape:
            model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth)))
            for layer in model:
                torch.manual_seed(SEED)
                init(layer.weight)
        assert not recording.storages
        with LiveBytes() as making:
            for tensor in named_tensors(model).values():
                tape.materialize(tensor)
        return recording.peak, making.peak

    assert peaks(4) == peaks(1)


def test_temporaries_go_when_they_are_used() -> None:
    def chain() -> Tensor:
        x = torch.randn(1000)
        for _ in range(8):
            x = x * 0.9
        return x

    with deferred_init() as tape:
        holder = Holder(chain)
    with LiveBytes() as live:
        tape.materialize(holder.b0)
    assert live.peak == 2 * 4000


class Draws(TorchDispatchMode):
    """Counts the random operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = not any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        self.count += real and torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_only_what_a_tensor_depends_on_runs_again() -> None:
    with deferred_init() as tape:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))).apply(init_weights)
        before = copy.deepcopy(model[2])
        model[2].weight.data.normal_()
    with Draws() as draws:
        tape.materialize(model[2].weight)
    assert draws.count == 1  # neither the other layers' nor what was overwritten
    with Draws() as draws:
        tape.materialize(before.weight)
    assert draws.count == 1  # nor what came later


def test_a_loop_that_looks_again_and_again_goes_on_from_where_it_was() -> None:
    def build() -> Tensor:  # as `nn.init.trunc_normal_` does since torch 2.13
        drawn = torch.empty(500).normal_()
        while (outside := drawn.abs() > 0.8).any():
            drawn = torch.where(outside, torch.empty_like(drawn).normal_(), drawn)
        return drawn

    torch.manual_seed(SEED)
    with Draws() as ordinary:
        build()
    assert ordinary.count > 5
    torch.manual_seed(SEED)
    with Draws() as draws, deferred_init():
        build()
    assert draws.count == 2 * ordinary.count  # once for the generator, once for the look

"""Several look at what autograd keeps, and none takes it from another."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_dist.engine.tensors.observers import SavedTensorsWatch, _hooks_in_force


def squared(x: Tensor) -> Tensor:
    return x**2  # keeps x


def test_all_watches_are_told() -> None:
    outer: list[float] = []
    inner: list[float] = []
    x = torch.tensor(3.0, requires_grad=True)
    with SavedTensorsWatch(lambda t: outer.append(t.item())):
        first = squared(x)
        with SavedTensorsWatch(lambda t: inner.append(t.item())):
            second = squared(2 * first.detach().requires_grad_())
        third = squared(first)
    assert inner[-1] == 18.0
    assert outer == [3.0, *inner, 9.0]
    (third + second).backward()
    assert x.grad == 4 * 3.0**3


def test_hooks_around_a_watch_still_keep_in_their_own_way() -> None:
    told: list[Tensor] = []
    packed: list[Any] = []

    def pack(tensor: Tensor) -> list[float]:
        packed.append([tensor.item()])
        return packed[-1]

    x = torch.tensor(3.0, requires_grad=True)
    own = saved_tensors_hooks(pack, lambda kept: torch.tensor(10 * kept[0]))
    with own, SavedTensorsWatch(lambda t: told.append(t.clone())):
        y = squared(x)
    assert packed == [[3.0]]
    assert told == [torch.tensor(3.0)]
    y.backward()
    assert x.grad == 2 * 30.0  # from what the outer hooks gave back


def test_what_a_watch_returns_lives_as_long_as_the_graph() -> None:
    class Token:
        num_alive = 0

        def __init__(self, _: Tensor) -> None:
            Token.num_alive += 1

        def __del__(self) -> None:
            Token.num_alive -= 1

    x = torch.tensor(3.0, requires_grad=True)
    with SavedTensorsWatch(Token), SavedTensorsWatch(Token):
        y = squared(x)
    assert Token.num_alive == 2
    y.backward()
    assert Token.num_alive == 0


def test_a_result_that_is_kept_does_not_hold_itself() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    with SavedTensorsWatch(lambda _: None):
        y = x.exp()  # keeps y
    graph = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert graph() is None
    finally:
        gc.enable()


def test_the_private_name_gives_the_innermost_hooks() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert _hooks_in_force() is None
    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, unpack):
        assert _hooks_in_force() == (pack, unpack)
    assert _hooks_in_force() is None

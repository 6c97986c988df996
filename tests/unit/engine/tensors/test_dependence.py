"""What depends on a tensor, told by operations, not by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist.engine.tensors.observers import DependenceWatch


class ReadError(Exception):
    """A marked tensor became a number."""


def read() -> None:
    raise ReadError


def written(marked: Tensor, other: Tensor) -> Tensor:
    base = other.clone()
    base[:2].copy_(marked[:2])
    return base


def summed(marked: Tensor, other: Tensor) -> Tensor:
    whole = [other.clone()]
    torch._foreach_add_(whole, [marked.detach()])
    return whole[0]


DEPEND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "compared": lambda marked, other: marked > other,
    "viewed": lambda marked, other: {"it": marked[1:]},
    "chosen": lambda marked, other: other[marked.argsort()],
    "written through a view": written,
    "written by a list": summed,
    "an output": lambda marked, other: torch.add(marked.detach(), 1, out=other.clone()),
}
DO_NOT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "other": lambda marked, other: other * 2,
    "zeros": lambda marked, other: torch.zeros_like(marked),
    "new": lambda marked, other: marked.new_full((2,), 3.0),
    "shape": lambda marked, other: other.expand_as(marked) + marked.shape[0],
    "device": lambda marked, other: other.to(marked.device, marked.dtype),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*DEPEND, *DO_NOT])
def test_marks_what_depends(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        marked, other = torch.randn(3, requires_grad=not inference), torch.randn(3)
        watch = DependenceWatch(read)
        watch.mark([marked])
        with watch:
            result = (DEPEND | DO_NOT)[name](marked, other)
        assert watch.has_marked(result) is (name in DEPEND)
        assert not watch.has_marked(other)


@pytest.mark.parametrize("decide", [bool, torch.Tensor.item, lambda t: torch.equal(t, t.clone())])
def test_tells_of_a_read(decide: Callable[[Tensor], object]) -> None:
    marked, other = torch.ones(1), torch.ones(1)
    watch = DependenceWatch(read)
    watch.mark(marked)
    with watch:
        decide(other)
        with watch.paused():
            decide(marked)
        with pytest.raises(ReadError):
            decide(marked)

"""A call is told of from outside, however the module is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.observers import CallWatch
from tests.helpers.graphs import Graphs


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            raise RuntimeError("nothing to double")
        return x * 2


@pytest.mark.parametrize("how", ["eager", "in place", "wrapped"])
def test_both_ends_of_a_call(how: str) -> None:
    graphs, told = Graphs(), []
    module: Any = Doubling()
    if how == "in place":
        module.compile(backend=graphs, fullgraph=True)
    if how == "wrapped":
        module = torch.compile(module, backend=graphs, fullgraph=True)

    def before(_: nn.Module, args: Any) -> None:
        told.append(("before", len(args)))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        told.append(("after", output if output is None else output.sum().item()))

    module(torch.ones(2))
    watch = CallWatch(module, before, after)
    for _ in range(3):
        assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    assert told == [("before", 1), ("after", 4.0)] * 3
    watch.remove()
    module(torch.ones(2))
    assert len(told) == 6
    assert (graphs.num_made, graphs.num_runs) == ((0, 0) if how == "eager" else (1, 5))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_call_that_fails_ends_too(is_compiled: bool) -> None:
    told: list[Any] = []
    module = Doubling()
    if is_compiled:
        module.compile(backend="eager")
    watch = CallWatch(module, lambda *_: None, lambda *rest: told.append(rest[-1]))
    with pytest.raises(RuntimeError, match="nothing to double"):
        module(torch.ones(0))
    assert told == [None]
    watch.remove()
    with pytest.raises(RuntimeError, match="nothing to double"):
        module(torch.ones(0))
    assert told == [None]

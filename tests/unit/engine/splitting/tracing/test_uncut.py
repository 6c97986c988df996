"""A trace is not cut where that would change what its forward computes, and says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing.sequence import TracedLayers
from tests.unit.engine.splitting.tracing.test_trace_refusals import Two


class Tied(Two):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class WritesLate(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result = self.second(hidden)
        hidden.view(-1).mul_(2)
        return result + hidden


class CountsInBuffer(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.add_(hidden.mean(0))
        return self.second(hidden) - self.mean


class WritesInOtherMode(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.add_(hidden.mean(0))
        result = self.second(hidden)
        return result if self.training else result - self.mean


class WritesInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        result = self.first(x)
        return self.second(result) + x.mul_(2)


@pytest.mark.parametrize(
    ("class_", "reason"),
    [
        (Tied, r"the parameter 'first.weight' is used more than once"),
        (WritesLate, r"written to in place at .*:\d+, `hidden.view\(-1\).mul_\(2\)`"),
        (CountsInBuffer, r"'mean' is written to in place"),
        (WritesInOtherMode, r"'mean' is written to in place, and used elsewhere in another mode"),
        (WritesInput, r"written to in place at .*`return self.second\(result\) \+ x.mul_\(2\)`"),
    ],
)
def test_is_not_cut_where_that_would_change_something(class_: type[nn.Module], reason: str) -> None:
    program = TracedLayers(class_(), (torch.ones(3, 4),), {}).program
    assert program.titles == ["first"]
    (found,) = program.uncut
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


class ReadsBesideABlock(Two):
    """Reads a buffer in a block that writes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.add_(hidden.mean(0) * self.rate)
        return self.second(hidden) * self.rate


def test_a_block_writes_only_what_its_operations_write() -> None:
    program = TracedLayers(ReadsBesideABlock(), (torch.ones(3, 4),), {}).program
    assert (program.titles, program.uncut) == (["first", "second"], [])


def test_a_buffer_that_another_layer_uses_at_another_size() -> None:
    class Late(Two):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if x.shape[0] == 1:
                return self.second(hidden) - self.mean
            return self.second(hidden - self.mean)

    module = Late()
    TracedLayers(module, (torch.rand(3, 4),), {})
    with pytest.raises(ValueError, match="uses the buffer 'mean' in another layer"):
        module(torch.rand(1, 4))

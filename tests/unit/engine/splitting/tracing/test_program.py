"""A traced module's graphs are kept, as many as somebody may go back and forth between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing import program as trace_program
from lightning_dist.engine.splitting.tracing.program import TraceProgram


class Scaled(nn.Module):
    """Has a graph for each factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor if self.training else 1.0
        result: Tensor = self.second(self.first(x) * factor)
        return result


def test_the_graph_not_used_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_program, "_MAX_GRAPHS", 4)
    traced: list[float] = []

    def counted(structure: nn.Module, example: Any, **options: Any) -> Any:
        assert isinstance(structure.factor, float)
        traced.append(structure.factor)
        return export(structure, example, **options)

    export = trace_program.export
    monkeypatch.setattr(trace_program, "export", counted)
    module = Scaled().train()
    program = TraceProgram(module, (torch.ones(3, 2),), {})
    assert traced == [0.0, 0.0]  # training and evaluation

    def traced_with(*factors: float) -> list[float]:
        traced.clear()
        for module.factor in factors:
            program.begin((torch.ones(3, 2),), {})
        return list(traced)

    assert traced_with(1.0, 2.0) == [1.0, 2.0]
    assert traced_with(0.0, 2.0, 1.0) == []
    assert traced_with(3.0) == [3.0]  # in the place of the evaluation's
    assert traced_with(0.0, 1.0, 2.0) == []
    assert traced_with(4.0) == [4.0]  # of 3.0's
    assert traced_with(1.0, 0.0, 2.0) == []
    assert traced_with(3.0) == [3.0]

"""To be watched changes nothing for those who compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.observers import OperationWatch


def seen_in(run: Any) -> list[str]:
    seen: list[str] = []
    with OperationWatch(lambda func, *_: seen.append(str(func))):
        run()
    return seen


def test_what_autograd_takes_apart_is_seen_in_parts_without_it_too() -> None:
    linear, x = nn.Linear(2, 2), torch.ones(3, 2)

    def infer() -> None:
        with torch.inference_mode():
            linear(x)

    assert "aten.addmm.default" in seen_in(lambda: linear(x))
    assert "aten.addmm.default" in seen_in(infer)


def test_a_branch_that_tensors_choose_is_no_obstacle() -> None:
    def choose() -> Tensor:
        result: Tensor = torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(2),))
        assert torch.equal(result, torch.ones(2).sin())
        return result

    assert any("cond" in name or "sin" in name for name in seen_in(choose))


def test_jagged_tensors_compute_as_ever() -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=torch.jagged)
    linear = nn.Linear(2, 2)
    results = []

    def step() -> None:
        linear.zero_grad()
        linear(rows).values().sum().backward()
        assert linear.weight.grad is not None
        results.append(linear.weight.grad.clone())

    step()
    assert seen_in(step)
    assert torch.equal(*results)

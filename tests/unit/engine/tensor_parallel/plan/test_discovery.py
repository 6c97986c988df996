from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from recipes.gpt import build_gpt
from tests.unit.engine.tensor_parallel.plan.parts import (
    mlp,
    plan_of,
)


def test_the_recipe_is_spread_wholly() -> None:
    plan = plan_of(build_gpt(depth=1))
    assert plan == {
        "0.token": "vocab",
        "1.attention.qkv": "colwise",
        "1.attention.out": "rowwise",
        "1.up": "colwise",
        "1.down": "rowwise",
        "2.logits": "colwise_gather",
    }
    assert list(plan) == [name for name, _ in build_gpt(depth=1).named_modules() if name in plan]


def test_the_module_s_own_plan_counts() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp()
            self.tower = mlp()

        def tensor_parallel_plan(self) -> dict[str, str]:
            return {"tower.up": "colwise", "tower.down": "rowwise"}

    assert plan_of(Own()) == {"tower.up": "colwise", "tower.down": "rowwise"}


def test_an_error_says_what_there_is_and_what_to_do() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x, x))

    message = r"^Pass plan=.* tensor_parallel_plan\(\).* for Odd: .*There are: Odd, Bilinear\."
    with pytest.raises(ValueError, match=message):
        find_plan(Odd())

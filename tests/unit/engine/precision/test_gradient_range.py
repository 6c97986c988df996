from __future__ import annotations

import torch

from lightning_dist.engine.precision.gradient_range import GradientRange, measure, merge

TINY = 2.0**-14
"""fp16's smallest normal number."""


def test_counts_what_the_range_cuts_off() -> None:
    scaled = torch.tensor([0.0, TINY, -TINY * 0.75, float("inf"), float("nan"), 7.0])
    gradients = {"a.weight": scaled / 64.0, "a.bias": torch.ones(2), "b.c.weight": torch.zeros(1)}
    found = measure(gradients, torch.float16, 64.0)
    assert found == {"a": GradientRange(8, 2, 2), "b.c": GradientRange(1, 0, 1)}
    assert found["a"].overflow_share == found["a"].underflow_share == 0.25
    assert measure({"a.weight": scaled}, torch.float16, 1.0)["a"] == GradientRange(6, 2, 2)
    assert measure({"a.weight": scaled}, torch.bfloat16, 1.0)["a"] == GradientRange(6, 2, 1)


def test_ranks_add_up() -> None:
    one = {"a": GradientRange(4, 1, 0), "b": GradientRange(2, 0, 2)}
    assert merge([one, {"a": GradientRange(4, 1, 2)}, {}]) == {
        "a": GradientRange(8, 2, 2),
        "b": GradientRange(2, 0, 2),
    }
    assert GradientRange().overflow_share == 0.0

from __future__ import annotations

import pytest
import torch

from lightning_dist.engine.precision.overflow import LocalOverflow, are_finite


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_element_is_enough(bad: float) -> None:
    gradients = [torch.zeros(3), torch.full((2, 2), 3e38)]
    assert are_finite(gradients)
    assert are_finite([])
    gradients[1][1, 0] = bad
    assert not are_finite(gradients)


def test_each_step_is_told_once() -> None:
    overflow = LocalOverflow()
    assert not overflow.decide([torch.ones(2)])
    assert overflow.decide([torch.tensor(float("nan"))])
    assert list(overflow.outcomes()) == [False, True]
    assert list(overflow.outcomes()) == []

from __future__ import annotations

import pytest

from lightning_dist.engine.stashing.learning_rates import RateCorrection


def test_the_rate_grows_to_the_full_one() -> None:
    correction = RateCorrection(staleness=4, num_steps=10)
    factors = [correction.factor(step) for step in (0, 5, 10, 99)]
    assert factors == pytest.approx([1 / 4, 1 / 2, 1.0, 1.0])


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_hardly_stale_is_left_alone(staleness: int) -> None:
    assert RateCorrection(staleness, num_steps=10).factor(0) == 1.0

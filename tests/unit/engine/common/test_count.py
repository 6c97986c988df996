"""Which numbers of something are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_dist.engine.common.names import check_count, check_positive


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_counts(value: Any) -> None:
    check_count("n", value)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, float("nan"), [2]])
def test_no_counts(value: Any) -> None:
    with pytest.raises(ValueError, match=r"n=.* must be an integer of at least 1\."):
        check_count("n", value)


def test_what_else_a_count_may_be_is_named() -> None:
    with pytest.raises(ValueError, match=r"n=1 must be 'auto' or an integer of at least 2\."):
        check_count("n", 1, at_least=2, instead="'auto'")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2)])
def test_amounts(value: Any) -> None:
    check_positive("n", value)


@pytest.mark.parametrize("value", [0, -0.5, "2", None, True, float("nan"), float("inf")])
def test_no_amounts(value: Any) -> None:
    with pytest.raises(ValueError, match=r"n=.* must be a number above 0\."):
        check_positive("n", value)

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.long_tests import left_out, superfluous


def cell(first: int, second: str) -> Any:
    params = {"first": first, "second": second}
    return SimpleNamespace(
        nodeid=f"test[{first}-{second}]", callspec=SimpleNamespace(params=params)
    )


def test_each_value_of_a_matrix_is_left() -> None:
    cells = [cell(first, second) for first, second in product(range(8), "abcde")]
    left = superfluous(cells)
    kept = [c.callspec.params for c in cells if c not in left]
    assert {p["first"] for p in kept} == set(range(8))
    assert {p["second"] for p in kept} == set("abcde")
    assert len(kept) <= 8 + 5 - 1
    assert superfluous(list(reversed(cells))) == left


@pytest.mark.long
@pytest.mark.each_value
@pytest.mark.parametrize("value", [1])
def test_a_long_test_is_left_out(value: int, request: pytest.FixtureRequest) -> None:
    assert left_out([request.node]) == [request.node]

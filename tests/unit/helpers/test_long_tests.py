from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

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


def test_a_long_test_is_left_out() -> None:
    def item(*marks: str) -> Any:
        return SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)

    long, short = item("long"), item("timeout")
    assert left_out([long, short]) == [long]

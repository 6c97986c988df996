from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.long_tests import left_out, less_telling, superfluous


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


def named(name: str, *patterns: str) -> Any:
    return SimpleNamespace(
        callspec=SimpleNamespace(id=name),
        get_closest_marker=lambda _: SimpleNamespace(args=patterns),
    )


def test_some_cells_are_left() -> None:
    cells = [named(name, "fsdp-2", "pp*") for name in ("fsdp-2", "fsdp-2x2", "pp-2", "tp-2")]
    assert [c.callspec.id for c in less_telling("test", cells)] == ["fsdp-2x2", "tp-2"]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="test: no cell is named 'ddp'"):
        less_telling("test", [named("fsdp", "fsdp", "ddp")])

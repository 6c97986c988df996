"""Which tests ``make test`` leaves to ``make test-all``.

Three marks say so:

- A ``long`` test runs with ``--all`` only: what it runs, shorter tests run too.
- Of a matrix marked ``each_value``, so many cells run that each value of each parameter occurs.
  They are chosen by a hash of their names, so the same ones run everywhere, from all over the
  matrix.
- Of a test marked ``some``, the cells run whose names match one of the mark's patterns, as those of
  a shell. They are the telling ones: the others do the same on another layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from zlib import crc32

import pytest


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests that run with ``--all`` only.

    Raises:
        ValueError: A mark has a pattern that no cell of its test matches.
    """
    left = [item for item in items if item.get_closest_marker("long") is not None]
    matrices: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        for mark in ("each_value", "some"):
            if isinstance(item, pytest.Function) and item.get_closest_marker(mark) is not None:
                matrices[mark, item.nodeid.partition("[")[0]].append(item)
    for (mark, test), cells in matrices.items():
        left += superfluous(cells) if mark == "each_value" else less_telling(test, cells)
    return left


def superfluous(cells: list[pytest.Function]) -> list[pytest.Function]:
    """Returns the cells of a matrix whose values all occur in other cells, too."""
    seen: set[tuple[str, str]] = set()
    left = []
    for cell in sorted(cells, key=lambda cell: crc32(cell.nodeid.encode())):
        values = {(name, repr(value)) for name, value in cell.callspec.params.items()}
        if values <= seen:
            left.append(cell)
        seen |= values
    return left


def less_telling(test: str, cells: list[pytest.Function]) -> list[pytest.Function]:
    """Returns the cells of a test whose names match none of its mark's patterns.

    Raises:
        ValueError: No cell matches a pattern.
    """
    mark = cells[0].get_closest_marker("some")
    assert mark is not None
    names = [cell.callspec.id for cell in cells]
    for pattern in mark.args:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{test}: no cell is named {pattern!r}. There are {names}.")
    return [
        cell
        for cell in cells
        if not any(fnmatchcase(cell.callspec.id, pattern) for pattern in mark.args)
    ]

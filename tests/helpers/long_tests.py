"""Which tests ``make test`` leaves to ``make test-all``.

Two marks say so. A ``long`` test runs with ``--all`` only: what it tests, shorter tests do too. Of
a matrix marked ``each_value``, so many cells run that each value of each parameter occurs. They are
chosen by a hash of their names, so the same ones run everywhere, from all over the matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import pytest


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests that run with ``--all`` only."""
    left = [item for item in items if item.get_closest_marker("long") is not None]
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value") is not None:
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cells in matrices.values():
        left += superfluous(cells)
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

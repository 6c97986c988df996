"""Each piece of ``make gpu`` as a test: nothing that it finds is wrong. Goals of speed may miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.catalog import PIECES
from tests.gpu.records import Folder
from tests.gpu.runner import run_piece
from tests.gpu.setting import Setting

LONGEST = max(piece.limit_seconds for piece in PIECES.values()) + 60


@pytest.mark.timeout(LONGEST)
@pytest.mark.parametrize("name", PIECES)
def test_piece(name: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    record = run_piece(name, Setting("cuda"), folder, PIECES[name].limit_seconds)
    assert record.failures == []
    assert record.rows

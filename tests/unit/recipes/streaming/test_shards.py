"""Shards are written once, go on where writing was interrupted, and are not overwritten."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipes.streaming import shards
from recipes.streaming.shards import PARTS, found_shards, main, read_format, write_shards
from recipes.text import load_text, split_text

TEXT = load_text()[:6000]


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "load_text", lambda: TEXT)


def rows_of(folder: Path, part: str) -> list[list[int]]:
    tables = [pq.read_table(path)["tokens"].to_pylist() for path in found_shards(folder, part)]
    return [row for rows in zip(*tables, strict=True) for row in rows]  # they take turns


def test_the_rows_are_the_text_without_padding(tmp_path: Path) -> None:
    assert "4 shards of 42 rows, 4 of them written now" in next(write_shards(tmp_path, 32, 4))
    list(write_shards(tmp_path, 32, 4))
    for part, tokens in zip(PARTS, split_text(TEXT), strict=True):
        rows = torch.tensor(rows_of(tmp_path, part))
        assert rows.shape[1] == 33
        assert torch.equal(rows[:-1, -1], rows[1:, 0])  # a row's last target, the next one's input
        joined = rows[:, :-1].flatten()
        assert torch.equal(joined, tokens[: len(joined)])
        assert len(tokens) - len(joined) <= 4 * 32


def test_an_interrupted_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path), "--sequence-length=32", "--shards=4"]
    assert main(words) == 0
    before = rows_of(tmp_path, "train")
    first, second, *_ = found_shards(tmp_path, "train")
    kept = first.stat().st_mtime_ns
    second.unlink()
    capsys.readouterr()
    assert main(words) == 0
    assert "4 shards of 42 rows, 1 of them written now" in capsys.readouterr().out
    assert rows_of(tmp_path, "train") == before
    assert first.stat().st_mtime_ns == kept


def test_shards_of_another_format_are_replaced_by_force_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--sequence-length=32", "--shards=4"]) == 0
    before = rows_of(tmp_path, "train")
    other = [str(tmp_path), "--sequence-length=16", "--shards=2"]
    assert main(other) == 2
    error = capsys.readouterr().err
    assert "sequence_length 32, not 16, num_shards 4, not 2" in error
    assert "--force" in error
    assert rows_of(tmp_path, "train") == before
    assert main([*other, "--force"]) == 0
    assert len(found_shards(tmp_path, "train")) == 2
    assert read_format(found_shards(tmp_path, "validation")[0]).sequence_length == 16


def test_a_file_of_something_else_is_an_error_even_by_force(tmp_path: Path) -> None:
    path = tmp_path / "train" / "00000-of-00004.parquet"
    path.parent.mkdir()
    path.write_text("something else")
    with pytest.raises(ValueError, match="no Parquet file"):
        list(write_shards(tmp_path, 32, 4, force=True))
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="was not written by"):
        list(write_shards(tmp_path, 32, 4, force=True))


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [
        (0, 4, "sequence_length=0 must be at least 1"),
        (32, 0, "num_shards=0 must be at least 1"),
        (32, 20, "A part of 600 tokens has 18 sequences of 32, fewer than 20 shards"),
    ],
)
def test_wrong_sizes(tmp_path: Path, length: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(write_shards(tmp_path, length, count))
    assert not list(tmp_path.iterdir())

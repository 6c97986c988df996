"""Records survive their files, a second call goes on, and the table says all that was found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.gpu.catalog import PIECES
from tests.gpu.pieces.no_sync import HostReads
from tests.gpu.pieces.speed import TINY
from tests.gpu.ranks import attempt, within
from tests.gpu.records import End, Folder, Record, Row, Verdict, describe_machine
from tests.gpu.runner import ROOT, choose
from tests.gpu.setting import Setting, missing_gpu
from tests.gpu.table import markdown

FIRST, SECOND, THIRD, *_ = PIECES
MACHINE = {"device": "a card", "torch": "2.11.0"}


def record_of(piece: str, end: End, *rows: Row, note: str = "") -> Record:
    return Record(piece, MACHINE, list(rows), end, 1.5, note)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "records")
    record = record_of(FIRST, End.DONE, Row("a", "1", "2", Verdict.MISSES), note="a note")
    folder.write(record)
    assert folder.read(FIRST) == record
    assert folder.read(SECOND) is None


def test_a_second_call_goes_on_with_what_has_not_ended(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert choose(folder, [], again=False) == list(PIECES)
    folder.write(record_of(FIRST, End.DONE))
    folder.write(record_of(SECOND, End.UNFINISHED))  # interrupted
    folder.write(record_of(THIRD, End.TIMED_OUT))
    assert choose(folder, [], again=False) == [SECOND, *list(PIECES)[3:]]
    assert choose(folder, [], again=True) == list(PIECES)
    assert choose(folder, [FIRST, SECOND], again=False) == [SECOND]
    with pytest.raises(ValueError, match="no piece 'nothing'.*two_ranks"):
        choose(folder, ["nothing"], again=False)


def test_what_has_failed(tmp_path: Path) -> None:
    rows = [Row("a", "1", "2", verdict) for verdict in Verdict]
    assert record_of(FIRST, End.DONE, *rows).failures == ["a: 1"]
    assert record_of(FIRST, End.CRASHED, note="it fell").failures == [f"{FIRST} crashed: it fell"]
    assert record_of(FIRST, End.DONE).failures == []


def test_the_table_has_each_row_and_what_has_not_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert markdown(folder) == "No piece has run yet."
    folder.write(record_of(FIRST, End.DONE, Row("a|b", "1\n2", "< 3", Verdict.HOLDS)))
    folder.write(record_of(SECOND, End.CRASHED, note="Traceback\nKeyError: 'x'"))
    lines = markdown(folder).splitlines()
    assert lines[0] == "Measured on: device a card, torch 2.11.0."
    assert lines[1:4] == ["", "| piece | what | found | wanted | |", "|---|---|---|---|---|"]
    assert lines[4] == rf"| {FIRST} | a\|b | 1 2 | < 3 | holds |"
    assert lines[5] == f"| {SECOND} | the piece | KeyError: 'x' |  | **crashed** |"
    assert lines[-1] == f"Not run: {', '.join(list(PIECES)[2:])}."


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [(0.9e-6, Verdict.HOLDS), (1e-6, Verdict.FAILS), (float("nan"), Verdict.FAILS)],
)
def test_a_difference_beside_its_tolerance(difference: float, verdict: Verdict) -> None:
    assert within("a", difference, 1e-6).verdict is verdict


def test_a_measurement_that_raises_is_a_row() -> None:
    def fail() -> Row:
        raise RuntimeError("first line\nlast line")

    row = attempt("a", fail)
    assert (row.what, row.verdict) == ("a", Verdict.FAILS)
    assert row.found == "RuntimeError: first line ... last line"


def test_the_machine_of_a_cpu() -> None:
    machine = describe_machine(Setting("cpu"))
    assert machine["torch"] == torch.__version__
    assert machine["device"].startswith("CPU")
    assert machine["transport"] == "auto"


def test_the_reason_of_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing_gpu() == (
        f"torch.cuda.is_available() is False: torch {torch.__version__} is built without CUDA"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert missing_gpu() is None


def test_the_page_lists_the_pieces_in_their_order() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert listed == list(PIECES)


def test_the_flops_of_a_gpt() -> None:
    """Beside torch's count of the matrix products; attention is by the formula in both."""
    sizes = TINY
    x = torch.zeros(sizes.batch, sizes.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        sizes.build()(x).sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in by_operation.items() if "attention" not in str(op))
    attention = 12 * sizes.depth * sizes.width * sizes.length
    assert products == (sizes.flops_per_token - attention) * sizes.tokens


def test_reads_of_values_are_noted() -> None:
    with HostReads() as reads:
        float(torch.ones(()) + 1.0)
        torch.ones(3) + torch.ones(3)
    assert len(reads.found) == 1
    assert reads.found[0].startswith("_local_scalar_dense in ")

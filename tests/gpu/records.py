"""What a piece has found: rows of a table, kept as JSON while the piece runs.

A record is written after each row, so a piece that crashes or runs out of time leaves its rows.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import lightning as L
import torch

from tests.gpu.setting import Setting


class Verdict(StrEnum):
    """What a row says of the code."""

    NOTED = ""
    """A measurement without a goal."""
    HOLDS = "holds"
    FAILS = "FAILS"
    """The code is wrong: the piece's test fails."""
    MISSES = "misses the goal"
    """A measurement beyond its goal: it is reported, and fails no test."""
    LEFT_OUT = "left out"
    """The row cannot be had here, for the reason that it tells."""


class End(StrEnum):
    """How a piece has ended."""

    UNFINISHED = "unfinished"
    DONE = "done"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was looked at.
        found: What was found there.
        wanted: What it is compared with.
        verdict: What follows.
    """

    what: str
    found: str
    wanted: str = ""
    verdict: Verdict = Verdict.NOTED


@dataclass
class Record:
    """A piece's rows, and where and how they were found.

    Attributes:
        piece: Name of the piece.
        machine: Device, versions, commit and date, as text.
        rows: The rows so far.
        end: How the piece has ended.
        seconds: Time that the piece took.
        note: The end of its output, if it has crashed or hung.
    """

    piece: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    end: End = End.UNFINISHED
    seconds: float = 0.0
    note: str = ""

    @property
    def failures(self) -> list[str]:
        """What is wrong, in a line each; a goal that was missed is not."""
        found = [f"{r.what}: {r.found}" for r in self.rows if r.verdict is Verdict.FAILS]
        if self.end is not End.DONE:
            found.append(f"{self.piece} {self.end}: {self.note}")
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Record:
        kept = json.loads(text)
        rows = [Row(**{**row, "verdict": Verdict(row["verdict"])}) for row in kept.pop("rows")]
        return cls(**{**kept, "end": End(kept["end"]), "rows": rows})


class Folder:
    """The records of a machine, a file for each piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def file_of(self, piece: str) -> Path:
        return self.path / f"{piece}.json"

    def read(self, piece: str) -> Record | None:
        """Returns a piece's record; None if there is none."""
        file = self.file_of(piece)
        return Record.from_json(file.read_text(encoding="utf-8")) if file.exists() else None

    def write(self, record: Record) -> None:
        """Keeps a record in place of an earlier one, whole or not at all."""
        file = self.file_of(record.piece)
        new = file.with_suffix(".new")
        new.write_text(record.to_json(), encoding="utf-8")
        new.replace(file)

    def missing(self, pieces: Iterable[str]) -> list[str]:
        """Returns the pieces that have not ended; the user may have interrupted one."""
        records = {piece: self.read(piece) for piece in pieces}
        return [
            p for p, record in records.items() if record is None or record.end is End.UNFINISHED
        ]


def describe_machine(setting: Setting) -> dict[str, str]:
    """Returns the device, the versions, the commit and the date."""
    versions = {"torch": str(torch.__version__), "lightning": L.__version__}
    if setting.is_gpu:
        properties = torch.cuda.get_device_properties(setting.torch_device)
        device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    else:
        device = f"CPU, {os.cpu_count()} cores"
    return {
        "device": device,
        **versions,
        "Python": platform.python_version(),
        "commit": _output("git", "describe", "--always", "--dirty"),
        "transport": setting.transport,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _output(*command: str) -> str:
    """Returns the first line that a command prints; "unknown" if it cannot run."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return (done.stdout.splitlines() or ["unknown"])[0]

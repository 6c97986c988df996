"""The table to paste into docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterable

from tests.gpu.catalog import PIECES
from tests.gpu.records import End, Folder, Record


def markdown(folder: Folder) -> str:
    """Returns all records of a folder as Markdown: the machine, and a row for each finding."""
    records = [record for name in PIECES if (record := folder.read(name)) is not None]
    if not records:
        return "No piece has run yet."
    lines = [
        *_machines(records),
        "",
        "| piece | what | found | wanted | |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        lines += [_line(record.piece, r.what, r.found, r.wanted, r.verdict) for r in record.rows]
        if record.end is not End.DONE:
            note = record.note.strip().splitlines()[-1:]
            lines.append(_line(record.piece, "the piece", *(note or [""]), "", f"**{record.end}**"))
    missing = [name for name in PIECES if folder.read(name) is None]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines)


def _machines(records: Iterable[Record]) -> list[str]:
    """Names each machine once: records of several days or commits may lie in one folder."""
    texts = [", ".join(f"{k} {v}" for k, v in record.machine.items()) for record in records]
    return [f"Measured on: {text}." for text in dict.fromkeys(texts)]


def _line(*cells: str) -> str:
    clean = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(clean)} |"

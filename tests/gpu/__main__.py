"""All that wants a GPU, on one: ``make gpu``, or ``python -m tests.gpu`` where all is installed.

Each piece runs in a process of its own with a time limit, and keeps what it finds in a folder. A
second call goes on with the pieces that are missing. At the end a table is printed, for
docs/gpu.md. With ``--device cpu`` the pieces themselves are tried, on small sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from lightning_dist.engine.splitting.config import Transport
from tests.gpu.catalog import PIECES
from tests.gpu.records import Folder, Record, Verdict
from tests.gpu.runner import ROOT, choose, run_piece
from tests.gpu.setting import DEVICES, Setting, missing_gpu
from tests.gpu.table import markdown

STYLES = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.MISSES: "yellow"}


def main() -> None:
    options = parser().parse_args()
    reason = missing_gpu()
    if options.device == "cuda" and reason is not None and not options.table:
        sys.exit(f"There is no GPU to test on: {reason}.\nTry the pieces with --device cpu.")
    setting = Setting(options.device, options.transport)
    folder = Folder(options.folder or ROOT / "runs" / "gpu" / options.device)
    console = Console()
    try:
        names = choose(folder, options.only, again=options.again)
    except ValueError as error:
        sys.exit(str(error))
    if not options.table:
        run_all(console, names, setting, folder, 60 * options.minutes, options.jobs)
    table = markdown(folder)
    (folder.path / "table.md").write_text(table + "\n", encoding="utf-8")
    console.rule(f"for docs/gpu.md; also in {folder.path / 'table.md'}")
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    records = [record for name in PIECES if (record := folder.read(name)) is not None]
    sys.exit(1 if any(record.failures for record in records) else 0)


def run_all(
    console: Console,
    names: list[str],
    setting: Setting,
    folder: Folder,
    seconds: float,
    num_jobs: int = 1,
) -> None:
    """Runs pieces until the time is over; a later call does the rest.

    With several jobs, pieces that measure no time run at once, ahead of the others.
    """
    end = time.monotonic() + seconds
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task(f"{len(names)} pieces", total=len(names))

        def run(name: str) -> None:
            limit = min(PIECES[name].limit_seconds, end - time.monotonic())
            if limit <= 0:
                progress.console.print(f"The time is over. Call again for {name}.")
                return
            task = progress.add_task(name, total=limit)
            watch = partial(show, progress, task, name, time.monotonic())
            record = run_piece(name, setting, folder, limit, watch)
            progress.remove_task(task)
            progress.advance(whole)
            print_record(progress.console, record)

        together = [n for n in names if num_jobs > 1 and not PIECES[n].is_timed]
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(run, together))
        for name in names:
            if name not in together:
                run(name)


def show(progress: Progress, task: TaskID, name: str, began: float, record: Record | None) -> None:
    """Moves a piece's bar by the time that has passed, and names its newest row."""
    rows = record.rows[-1:] if record is not None else []
    text = " after ".join([name, *(row.what for row in rows)])
    progress.update(task, completed=time.monotonic() - began, description=text[:60])


def print_record(console: Console, record: Record) -> None:
    console.print(f"[bold]{record.piece}[/] {record.end}, {record.seconds:.0f} s", highlight=False)
    for row in record.rows:
        wanted = f" (wanted: {row.wanted})" if row.wanted else ""
        text = f"  {row.what}: {row.found}{wanted} {row.verdict}"
        console.print(text, style=STYLES.get(row.verdict), markup=False, highlight=False)
    if record.note:
        console.print(record.note, style="red", markup=False, highlight=False)


def parser() -> argparse.ArgumentParser:
    catalog = "\n".join(f"  {name:<16}{piece.title}" for name, piece in PIECES.items())
    made = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        epilog=f"pieces, most telling first:\n{catalog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=DEVICES, default="cuda")
    made.add_argument(
        "--only", action="append", default=[], metavar="PIECE", help="may be given several times"
    )
    made.add_argument("--again", action="store_true", help="also what has run; by default the rest")
    made.add_argument(
        "--jobs", type=int, default=1, help="pieces at once, of those that measure no time"
    )
    made.add_argument("--minutes", type=float, default=30.0, help="after which no piece begins")
    transports = get_args(Transport)
    made.add_argument("--transport", choices=transports, default="auto", help="of two ranks")
    made.add_argument("--folder", type=Path, help="of the records; by default runs/gpu/DEVICE")
    made.add_argument("--table", action="store_true", help="only print the table of what has run")
    return made


if __name__ == "__main__":
    main()

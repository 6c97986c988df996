"""The time that importing takes: ``python -m tests.benchmarks.imports``.

Not a test: it prints a table. New processes import Lightning and this package in turns, after one
process of each has compiled what it imports. The seconds are the processor's: importing waits for
little else, and so a machine that others use, too, can be measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

LIGHTNING = "import lightning"
WITH_OURS = "import lightning_dist"
OURS = "import lightning, then import lightning_dist"
TIMED = "import time; began = time.process_time(); {}; print(time.process_time() - began)"
PROGRAMS = {
    LIGHTNING: TIMED.format(LIGHTNING),
    WITH_OURS: TIMED.format(WITH_OURS),
    OURS: f"{LIGHTNING}; {TIMED.format(WITH_OURS)}",
}


def seconds_of(program: str) -> float:
    """Returns what a program prints, run by a new process that keeps compiled modules."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = (sys.executable, "-W", "ignore", "-c", program)
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for program in PROGRAMS.values():
        seconds_of(program)
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for name in track([n for _ in range(rounds) for n in PROGRAMS], description="imports"):
        times[name].append(seconds_of(PROGRAMS[name]))
    table = Table(title=f"Processor seconds of an import, {rounds} processes each")
    for heading in ("", "median", "fastest", "slowest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in times.items():
        spread = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{value:.3f}" for value in spread))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""From the launch of two ranks to the end of a step: ``python -m tests.benchmarks.first_step``.

Not a test: it prints a table. Contestants are launched in turns. The phases are those of the rank
that starts last. Lightning's launcher starts it when the first rank has imported its modules and
built its model. It imports its own, meets the first one (``rendezvous``), and sets the run up until
there is a batch. The first step ends when it has ended on all ranks. The processor's seconds are
those of both ranks until they end; other users of the machine disturb these less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.benchmarks.first_step_rank import FOLDER, LIGHTNINGS, OURS, PIPELINE, TORCHRUN

CONTESTANTS = (TORCHRUN, LIGHTNINGS, OURS, f"{PIPELINE}1f1b", f"{PIPELINE}pipedream")
PHASES = {
    "started": "start of the last rank",
    "imported": "imports",
    "met": "rendezvous",
    "ready": "setup",
    "stepped": "first step",
}
PROCESSOR = "processor seconds"


def start(name: str) -> dict[str, float]:
    """Runs a contestant; gives seconds by phase, and the processor's of both ranks."""
    command = [sys.executable, "-W", "ignore", "-m"]
    if name == TORCHRUN:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["tests.benchmarks.first_step_rank", name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        launched = time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} has failed: {done.stderr}")
        ranks = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    last = max(ranks, key=lambda times: times["started"])
    last["stepped"] = max(times["stepped"] for times in ranks)
    marks = [launched, *(last[mark] for mark in PHASES)]
    seconds = [end - begin for begin, end in pairwise(marks)]
    used = sum(times["processor"] for times in ranks)
    return {**dict(zip(PHASES.values(), seconds, strict=True)), PROCESSOR: used}


def whole(seconds: dict[str, float]) -> float:
    return sum(seconds[phase] for phase in PHASES.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="starts of each contestant")
    parser.add_argument("--only", default="", help="names that contain one of these, parted by |")
    options = parser.parse_args()
    wanted = options.only.split("|")
    runs = {name: [] for name in CONTESTANTS if any(w in name for w in wanted)}
    for name in runs:
        start(name)  # compiles what it imports
    for name in track([n for _ in range(options.rounds) for n in runs], description="starts"):
        runs[name].append(start(name))
    table = Table(title=f"Seconds to the end of the first step, two ranks, {options.rounds} starts")
    table.add_column("", no_wrap=True)
    ratios = ("x Lightning's DDP", f"{PROCESSOR}, x Lightning's DDP")
    for heading in ("all", *PHASES.values(), PROCESSOR, *ratios):
        table.add_column(heading, justify="right")
    for name, starts in runs.items():
        columns = [[whole(seconds) for seconds in starts]]
        for phase in (*PHASES.values(), PROCESSOR):
            columns.append([seconds[phase] for seconds in starts])
        pairs = list(zip(starts, runs.get(LIGHTNINGS, []), strict=False))
        columns.append([whole(own) / whole(theirs) for own, theirs in pairs])
        columns.append([own[PROCESSOR] / theirs[PROCESSOR] for own, theirs in pairs])
        medians = (f"{statistics.median(values):.2f}" if values else "-" for values in columns)
        table.add_row(name, *medians)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

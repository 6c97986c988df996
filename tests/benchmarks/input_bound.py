"""A run that waits for its data, and what changes that: ``python -m tests.benchmarks.input_bound``.

Not a test. Each sample is prepared from a source file of Python's: parsed, and its docstrings made
tokens. In the process that trains, in a worker, or once for all. The ways take turns; each is
compared with the first one of its own round.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dist.callbacks import StepProfiler
from lightning_dist.engine.profiling.report import ProfileReport
from recipes.gpt import GPT
from tests.benchmarks.quiet import QUIET_TRAINER, quieten

BATCH, SEQUENCE_LENGTH, NUM_BATCHES, ACTIVE = 32, 128, 24, 15
MOST_BYTES = 20_000  # of a file


class Sources(Dataset[tuple[Tensor, Tensor]]):
    """Parses a source file for each sample."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        small = (path for path in library.glob("*.py") if path.stat().st_size < MOST_BYTES)
        self.paths = sorted(small)

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tree = ast.parse(self.paths[index % len(self.paths)].read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)]
        text = "\n".join(texts).encode().ljust(SEQUENCE_LENGTH + 1)[: SEQUENCE_LENGTH + 1]
        tokens = torch.tensor(list(text))
        return tokens[:-1], tokens[1:]


def prepared(sources: Sources) -> TensorDataset:
    """Prepares all samples once."""
    inputs, targets = zip(*(sources[i] for i in range(len(sources))), strict=True)
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


def profile(loader: DataLoader[Any]) -> ProfileReport:
    """Profiles a short training."""
    profiler = StepProfiler(active_steps=ACTIVE, warmup_steps=3)
    # Its table at the end of training is one of this script's, too.
    profiler.on_train_end = lambda *_: None  # type: ignore[method-assign]
    trainer = L.Trainer(
        **QUIET_TRAINER, accelerator="cpu", devices=1, max_epochs=1, callbacks=[profiler]
    )
    torch.manual_seed(0)
    trainer.fit(GPT(), loader)
    assert profiler.report is not None
    return profiler.report


def main() -> None:
    """Prints a table of the ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the ways")
    rounds = parser.parse_args().rounds
    quieten()
    torch.set_num_threads(1)
    sources = Sources()
    once = prepared(sources)
    ways: dict[str, tuple[Dataset[Any], int]] = {
        "num_workers=0": (sources, 0),
        "num_workers=1": (sources, 1),
        "prepared once": (once, 0),
    }
    reports: dict[str, list[ProfileReport]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (data, num_workers) in ways.items():
            loader = DataLoader(data, batch_size=BATCH, num_workers=num_workers)
            reports[way].append(profile(loader))
    base = reports["num_workers=0"]
    print(base[0].input_wait)
    table = Table(title=f"Medians of {rounds} rounds")
    for heading in ("samples", "wait for data", "step, ms", "speed beside the first, by round"):
        table.add_column(heading)
    for way, own in reports.items():
        ratios = [b.step_seconds / r.step_seconds for b, r in zip(base, own, strict=True)]
        table.add_row(
            way,
            f"{statistics.median(report.input_wait.share for report in own):.0%}",
            f"{1e3 * statistics.median(report.step_seconds for report in own):.0f}",
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""What loggers show: Weights & Biases for real, offline, and TensorBoard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer, StepProfiler
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool

QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}


def fit(directory: str) -> list[str]:
    os.environ.update(QUIET)
    loggers: list[Logger] = [
        WandbLogger(save_dir=directory, offline=True, project="profiled"),
        TensorBoardLogger(directory, name="board"),
        CSVLogger(directory, name="csv"),
    ]
    callbacks: list[L.Callback] = [
        StepProfiler(active_steps=2, warmup_steps=0, trace_dir=directory),
        StageBalancer(every_n_steps=5, measured_steps=2, warmup_steps=1),
    ]
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(num_microbatches=2),
        logger=loggers,
        callbacks=callbacks,
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    trainer.fit(make_module(), make_loader(), make_loader())
    if trainer.is_global_zero:
        loggers[0].experiment.finish()
    return [type(logger).__name__ for logger in loggers]


def inspect(path: Path) -> dict[str, Any]:
    """Reads a run back with the public tool."""
    tool = Path(sys.executable).parent / "wandb"
    command = [tool, "leet", "inspect", "--summary", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


PICTURES = {"profile/timeline", "balance/picture"}
TABLES = {f"profile/{n}" for n in ("summary", "time", "memory", "spans")} | {
    "balance/layers",
    "balance/stages",
}


def test_each_logger_gets_what_it_can_show(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(2, fit, str(tmp_path), timeout=90)
    (run,) = tmp_path.rglob("*.wandb")
    inspected = inspect(run)
    assert inspected["state"] == "finished"
    shown = {n: v["_type"] for n, v in inspected["summary"].items() if isinstance(v, dict)}
    assert {name for name, kind in shown.items() if kind == "images/separated"} == PICTURES
    assert {name for name, kind in shown.items() if kind == "table-file"} == TABLES
    assert shown["profile/page"] == "html-file"
    for name in ("profile/bubble_fraction", "profile/step_seconds", "balance/gain"):
        assert isinstance(inspected["summary"][name], int | float)
    (table,) = run.parent.rglob("spans_*.table.json")
    spans = json.loads(table.read_text())
    assert spans["columns"] == ["rank", "kind", "action", "start (ms)", "duration (ms)"]
    assert {"0F0", "1B1"} <= {row[2] for row in spans["data"]}
    (events,) = tmp_path.joinpath("board").rglob("events.out.*")
    board = EventAccumulator(str(events)).Reload().Tags()
    assert set(board["images"]) == PICTURES
    assert "profile/bubble_fraction" in board["scalars"]
    assert "profile/memory/text_summary" in board["tensors"]
    (metrics,) = tmp_path.joinpath("csv").rglob("metrics.csv")
    header = metrics.read_text().splitlines()[0].split(",")
    assert {"profile/step_seconds", "balance/gain"} <= {*header}
    (picture,) = tmp_path.rglob("stage_balance.png")
    assert picture.stat().st_size < 200_000

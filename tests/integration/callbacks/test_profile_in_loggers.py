"""Each report comes to loggers once, at its step, whatever becomes of the run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_dist.callbacks import StepProfiler
from tests.helpers.networks.models import make_loader, make_module, make_trainer


class Failing(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 30:
            raise RuntimeError("no power")


def fit_alone(directory: Path, *others: Callback, **options: Any) -> tuple[StepProfiler, Trainer]:
    """Profiles 4 batches each time, of epochs of 6; the option ``ckpt_path`` resumes a run."""
    resumes = {"ckpt_path": options.pop("ckpt_path", None)}
    profiler = StepProfiler(15, 4, warmup_steps=2)
    shared = {"devices": 1, "limit_val_batches": 0, "logger": CSVLogger(directory)}
    trainer = make_trainer(callbacks=[profiler, *others], max_epochs=10, **shared, **options)
    trainer.fit(make_module(), make_loader(), make_loader(), **resumes)
    return profiler, trainer


def steps_with_metrics(directory: Path) -> list[int]:
    (path,) = directory.rglob("metrics.csv")
    rows = csv.DictReader(path.read_text().splitlines())
    return [int(row["step"]) for row in rows if row.get("profile/step_seconds")]


def test_loggers_get_each_report_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    profiler, trainer = fit_alone(tmp_path / "first", max_steps=12)
    assert profiler.report is not None
    assert profiler.report.batches() == "batches 4 to 7"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    # None of them at a 50th batch, Lightning's default of log_every_n_steps.
    assert steps_with_metrics(tmp_path / "first") == [8]
    resumed, _ = fit_alone(tmp_path / "resumed", ckpt_path=tmp_path / "last.ckpt")
    assert steps_with_metrics(tmp_path / "resumed") == [20, 35, 50]
    assert resumed.report is not None
    assert resumed.report.batches() == "batches 46 to 49"
    assert {s.action.microbatch_index for s in resumed.report.timeline.spans} == {46, 47, 48, 49}


def test_a_run_that_fails_has_its_newest_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="no power"):
        fit_alone(tmp_path, Failing())
    assert steps_with_metrics(tmp_path) == [8, 23]
    assert "19 to 22, 4 timed" in capsys.readouterr().out
    assert len([*tmp_path.rglob("step_profile.*")]) == 3

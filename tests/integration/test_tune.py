"""A study on two ranks, of which trials fail: on all ranks, on one, and by a signal."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from recipes.tune import main
from tests.helpers.processes.workers import WorkerPool

optuna = pytest.importorskip(
    "optuna", reason="optuna is not installed: pip install 'lightning-dist[tune]'"
)

FAULTS = ["none", "raise", "memory", "kill", "bad"]
OPTIONS = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": {"class_path": "lightning_dist.PipelineStrategy"},
        "max_epochs": 2,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
    },
    "model": {"class_path": "tests.helpers.fragile_gpt.FragileGPT", "init_args": {"fault": "none"}},
    "data": {"batch_size": 8, "sequence_length": 16},
}


def write_study(folder: Path) -> Path:
    base, path = folder / "base.yaml", folder / "study.yaml"
    base.write_text(yaml.safe_dump(OPTIONS))
    study = {
        "base": str(base),
        "out": str(folder / "out"),
        "storage": "study.log",
        "trials": len(FAULTS),
        "max_failures": len(FAULTS),
        "skipped_batches": 0,
        "objectives": {"val_loss": "minimize"},
        "space": {"fault": {"option": "model.init_args.fault", "choices": FAULTS}},
        "sampler": {
            "class_path": "optuna.samplers.GridSampler",
            "init_args": {"search_space": {"fault": FAULTS}},
        },
        "pruner": {"class_path": "optuna.pruners.ThresholdPruner", "init_args": {"upper": 50.0}},
    }
    path.write_text(yaml.safe_dump(study))
    return path


def tune(path: str, *more: str) -> tuple[str, str]:
    os.environ["COLUMNS"] = "140"
    output, end = StringIO(), ""
    with redirect_stdout(output), redirect_stderr(output):
        try:
            main([f"--config={path}", *more])
        except SystemExit as stopped:
            end = str(stopped.code)
    return output.getvalue(), end


@pytest.mark.long
def test_trials_fail_alone_and_the_study_goes_on(workers: WorkerPool, tmp_path: Path) -> None:
    path = write_study(tmp_path)
    (printed, _), (silence, _) = workers.run(2, tune, str(path), timeout=200)
    assert silence == ""
    assert "The best by val_loss: python -m recipes.train fit" in printed
    assert "2 ranks" in (tmp_path / "out" / "trial_0" / "rank_0.log").read_text()
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "out" / "study.log"))
    )
    trials = {
        trial.params["fault"]: trial
        for trial in optuna.load_study(study_name="study", storage=storage).trials
    }
    assert {fault: trial.state.name for fault, trial in trials.items()} == {
        "none": "COMPLETE",
        "raise": "FAIL",
        "memory": "FAIL",
        "kill": "FAIL",
        "bad": "PRUNED",
    }
    errors = {fault: trial.user_attrs.get("error", "") for fault, trial in trials.items()}
    assert "RuntimeError: asked to raise" in errors["raise"]
    assert "OutOfMemoryError: asked to run out of memory" in errors["memory"]
    assert "was killed" in errors["kill"]
    assert 4 < trials["none"].values[0] < 7
    assert trials["none"].user_attrs["epochs"] == 2
    assert trials["bad"].user_attrs["epochs"] == 1
    # Both ranks end alike where the study is of something else.
    other = "--objectives={val_loss: maximize}"
    (error, _), (silence, _) = ended = workers.run(2, tune, str(path), other, timeout=60)
    assert "a study of something else: objectives.val_loss was 'minimize'" in error
    assert silence == ""
    assert [status for _, status in ended] == ["1", "1"]

"""A data-parallel run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from lightning_dist import DDPStrategy
from tests.helpers.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.script_runs import STARTUP_SECONDS, child_of, script, training_script
from tests.helpers.workers import WorkerPool


def test_a_users_exception_ends_all_ranks_and_is_shown_first() -> None:
    with script("--schedule", "ddp", "--trouble", "raise", "--stage", "1") as run:
        assert run.wait(STARTUP_SECONDS) == 1
    errors = re.findall(
        r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)): .*", run.output, re.M
    )
    assert errors[0] == "KeyError", errors
    assert "the user's own mistake" in run.output


def test_a_killed_rank_ends_the_other_and_is_named() -> None:
    with script("--schedule", "ddp", "--trouble", "sigkill", "--stage", "1") as run:
        start = time.monotonic()
        assert run.wait(STARTUP_SECONDS + 30) != 0
        assert time.monotonic() - start < STARTUP_SECONDS
    assert "process of rank 1 was lost" in run.output


def test_sigterm_ends_all_ranks_at_one_batch_boundary(tmp_path: Path) -> None:
    with training_script(tmp_path, "--schedule", "ddp", "--pause", "0.02") as run:
        time.sleep(0.3)
        os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1])


def test_sigterm_ends_an_evaluation_at_one_batch_boundary(tmp_path: Path) -> None:
    with training_script(
        tmp_path, "--schedule", "ddp", "--task", "validate", "--pause", "0.02"
    ) as run:
        time.sleep(0.3)
        os.kill(child_of(run.process.pid), signal.SIGTERM)
        assert run.wait(15) == 0, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(reports[0]) == len(reports[1]) < 500
    assert "Error" not in run.output, run.output


class Synced(Classifier):
    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "sync_dist": True})

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def validate_unevenly() -> tuple[float, int]:
    rank = int(os.environ["RANK"])
    trainer = make_trainer(devices=2, strategy=DDPStrategy())
    loaders = [make_loader(16 + 16 * rank), make_loader(32 - 16 * rank)]
    metrics = trainer.validate(make_module(Synced), loaders, verbose=False)
    return sum(sum(m.values()) for m in metrics), sum(trainer.num_val_batches)


def test_replicas_evaluate_different_numbers_of_batches(workers: WorkerPool) -> None:
    (first, batches), (second, others) = workers.run(2, validate_unevenly)
    assert first == second
    assert batches == others == 6

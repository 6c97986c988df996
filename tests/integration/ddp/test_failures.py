"""A data-parallel run in which something goes wrong ends soon, everywhere, and says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_dist import DDPStrategy
from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.forked_runs import (
    END_AFTER_KILL_SECONDS,
    END_SECONDS,
    WarmPython,
    errors_in,
)
from tests.helpers.processes.workers import WorkerPool


def test_a_users_exception_ends_all_ranks_and_is_shown_first(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    with warm_python.trouble(
        tmp_path, "--schedule", "ddp", "--trouble", "raise", "--stage", "1"
    ) as run:
        assert run.wait(END_SECONDS) == [1, 1]
    assert errors_in(run.output)[0] == "KeyError", run.output
    assert "the user's own mistake" in run.output


def test_a_killed_rank_ends_the_other_and_is_named(warm_python: WarmPython, tmp_path: Path) -> None:
    with warm_python.trouble(
        tmp_path, "--schedule", "ddp", "--trouble", "sigkill", "--stage", "1"
    ) as run:
        assert run.wait(END_AFTER_KILL_SECONDS) == [1, -signal.SIGKILL]
    assert "process of rank 1 was lost" in run.output


@pytest.mark.some("validate-*")
@pytest.mark.parametrize(
    ("task", "ranks"), [("fit", [0, 1]), ("validate", [1]), ("predict", [0])], ids=str
)
def test_sigterm_ends_all_ranks_at_one_batch_boundary(
    warm_python: WarmPython, tmp_path: Path, task: str, ranks: list[int]
) -> None:
    with warm_python.training(
        tmp_path, "--schedule", "ddp", "--task", task, "--pause", "0.02"
    ) as run:
        time.sleep(0.3)
        for rank in ranks:
            run.send(signal.SIGTERM, rank)
        assert run.wait(15) == [SIGTERM_EXIT_CODE] * 2, run.output
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

"""A run on a mesh with stages ends soon, everywhere, and says why."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist import MeshStrategy
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.strategies.base.ending.signal_handlers import SIGTERM_EXIT_CODE
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.forked_runs import (
    END_AFTER_KILL_SECONDS,
    END_SECONDS,
    WarmPython,
    errors_in,
)
from tests.helpers.processes.workers import WorkerPool

MESH = ("--schedule", "mesh")


@pytest.mark.long
def test_a_users_exception_ends_all_ranks_and_is_shown_first(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    trouble = ("--trouble", "raise", "--stage", "0")
    with warm_python.trouble(tmp_path, *MESH, *trouble, devices=4) as run:
        assert run.wait(END_SECONDS) == [1] * 4
    assert errors_in(run.output)[0] == "KeyError", run.output
    assert "While rank 0 ran action 0F" in run.output


def test_a_killed_rank_ends_all_others_and_is_named(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    trouble = ("--trouble", "sigkill", "--stage", "1")
    with warm_python.trouble(tmp_path, *MESH, *trouble, devices=4) as run:
        assert run.wait(END_AFTER_KILL_SECONDS) == [1, -signal.SIGKILL, 1, 1]
    assert "process of rank 1 was lost" in run.output


@pytest.mark.long
def test_sigterm_ends_all_ranks_at_one_batch_boundary(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    with warm_python.training(tmp_path, *MESH, "--pause", "0.02", devices=4) as run:
        time.sleep(0.3)
        run.send(signal.SIGTERM, 2)
        assert run.wait(15) == [SIGTERM_EXIT_CODE] * 4, run.output
    reports = [(tmp_path / f"report.{rank}").read_text().splitlines() for rank in range(4)]
    assert len({len(report) for report in reports}) == 1
    assert "Error" not in run.output, run.output


class RaisesAtOnce(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if dist.get_rank() < 2:
            raise KeyError("of the first stage")
        return super().training_step(batch, batch_idx)


def fail_in_the_first_step() -> str:
    strategy = MeshStrategy(pp=2, dp_shard=2, pipeline=PipelineConfig(num_microbatches=2))
    trainer = make_trainer(devices=4, strategy=strategy, num_sanity_val_steps=0)
    with pytest.raises((KeyError, RankFailedError)) as caught:
        trainer.fit(make_module(RaisesAtOnce), make_loader(16), make_loader(16))
    return f"{caught.typename}: {caught.value}"


def test_shards_of_a_stage_that_nothing_has_reached_say_who_failed(workers: WorkerPool) -> None:
    *first, second, third = workers.run(4, fail_in_the_first_step)
    assert all(error.startswith("KeyError") for error in first)
    for error in (second, third):
        assert error.startswith("RankFailedError: Rank ")
        assert "of the first stage" in error

"""SLURM announces the end of a job: the ranks save at one batch, and the requeued job goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch import Tensor

from tests.helpers.networks.models import assert_equal, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.strategies.saving.test_saving_on_exception import (
    AT_BATCH,
    STRATEGIES,
    Sends,
    fit_quietly,
    saved_in,
)

# Another rank asks for nothing: the file would have a line more.
SCONTROL = '#!/bin/sh\necho "$SLURM_PROCID: $@" >> "$ASKED"\n'


class SendsLate(Sends):
    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer, AT_BATCH)


def job(strategy: str, folder: str, programs: str, *sends: L.Callback) -> dict[str, Tensor]:
    """Trains as one rank of a job."""
    rank = os.environ["RANK"]
    os.environ.update(SLURM_JOB_ID="7", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2")
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")
    os.environ.update(SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="2")
    os.environ.update(PATH=f"{programs}:{os.environ['PATH']}", ASKED=f"{programs}/asked")
    trainer = make_trainer(
        devices=2,
        strategy=STRATEGIES[strategy](),
        plugins=[SLURMEnvironment()],
        callbacks=list(sends),
        limit_val_batches=0,
        default_root_dir=folder,
    )
    module = make_module(optimizer="adamw")
    fit_quietly(trainer, module)
    assert trainer.global_step == 6
    return state_of(module)


def make_scontrol(folder: Path) -> Path:
    programs = folder / "programs"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL)
    (programs / "scontrol").chmod(0o755)
    return programs


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_requeued_job_goes_on_where_all_ranks_have_saved(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    """SLURM lets the first job go on after the save, so that it ends as the second one does."""
    programs, folder, sends = make_scontrol(tmp_path), tmp_path / "root", Sends(signal.SIGUSR1)
    first = workers.run(2, job, strategy, str(folder), str(programs), sends)
    assert (programs / "asked").read_text() == "0: requeue 6_2\n"
    assert [path.name for path in folder.iterdir()] == ["hpc_ckpt_1.ckpt"]
    (steps,) = saved_in(folder)
    assert AT_BATCH < steps <= 5
    second = workers.run(2, job, strategy, str(folder), str(programs), sends)
    assert (programs / "asked").read_text() == "0: requeue 6_2\n"  # AT_BATCH is behind it
    for whole, resumed in zip(first, second, strict=True):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.some("pipeline")
@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "pipedream"])
def test_a_signal_behind_the_last_batch_is_obeyed_at_the_end(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    programs, folder = make_scontrol(tmp_path), tmp_path / "root"
    arguments = (strategy, str(folder), str(programs), SendsLate(signal.SIGUSR1))
    whole = workers.run(2, job, *arguments)
    assert (programs / "asked").read_text() == "0: requeue 6_2\n"
    assert saved_in(folder) == [6]
    requeued = workers.run(2, job, *arguments)  # which has nothing left to train
    assert (programs / "asked").read_text() == "0: requeue 6_2\n"
    for expected, found in zip(whole, requeued, strict=True):
        assert_equal(found, expected)

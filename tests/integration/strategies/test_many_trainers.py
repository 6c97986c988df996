"""Ten Trainers in a process leave what two leave: descriptors, threads, shared memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "uneven": lambda: DDPStrategy(uneven_inputs=True),
    "fsdp": FSDPStrategy,
    "tensor": lambda: TensorParallelStrategy(plan={"model.*.linear": "colwise_gather"}),
    "mesh": lambda: MeshStrategy(pp=2),
    "pipeline": PipelineStrategy,
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
}


def left() -> dict[str, int]:
    gc.collect()
    shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": len(shared),
    }


def share(strategy: str) -> Any:
    return make_loader(12 if strategy == "uneven" and os.environ["RANK"] == "0" else 22)


def fit_often(strategy: str, directory: str) -> list[dict[str, int]]:
    found = []
    for number in range(10):
        trainer = make_trainer(devices=2, strategy=STRATEGIES[strategy](), limit_val_batches=1)
        module = make_module(depth=2)
        trainer.fit(module, share(strategy), make_loader())
        trainer.validate(module, make_loader(), verbose=False)
        trainer.save_checkpoint(f"{directory}/last.ckpt")
        del trainer, module
        if number in (1, 9):
            found.append(left())
    return found


class FitsWithin(L.Callback):
    """Trains another model in the middle of a run."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == 1:
            within = make_trainer(devices=2, strategy=PipelineStrategy(schedule="pipedream"))
            within.fit(make_module(depth=2), make_loader(22), make_loader(8))


def fit_within(strategy: str) -> list[dict[str, Any]]:
    """Trains with and without a run within, beside a group of the user's."""
    states = []
    own = None
    for callbacks in ([], [FitsWithin()], []):
        trainer = make_trainer(devices=2, strategy=STRATEGIES[strategy](), callbacks=callbacks)
        module = make_module()
        trainer.fit(module, make_loader(), make_loader())
        states.append(state_of(module))
        own = own or dist.new_group(backend="gloo")
        dist.barrier(own)
        trainer.validate(module, make_loader(), verbose=False)
        trainer.fit(module, make_loader(), make_loader(8))
        assert trainer.strategy.broadcast(trainer.global_rank) == 0
    return states


@pytest.mark.some("pipeline")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mesh", "pipeline", "pipedream"])
def test_runs_and_runs_within_runs_do_not_disturb_each_other(
    workers: WorkerPool, strategy: str
) -> None:
    for first, *others in workers.run(2, fit_within, strategy):
        for other in others:
            assert all(torch.equal(other[name], value) for name, value in first.items())


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_trainers_leave_what_two_leave(
    workers: WorkerPool, strategy: str, tmp_path: Any
) -> None:
    for two, ten in workers.run(2, fit_often, strategy, str(tmp_path), timeout=150):
        assert all(count <= two[name] for name, count in ten.items()), (two, ten)

"""A Trainer fits the processes that the script runs in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, PipelineStrategy])
@pytest.mark.parametrize("devices", [1, 4])
def test_another_number_of_processes_is_refused(
    strategy: Callable[[], DistributedStrategy], devices: int
) -> None:
    with fake_rank(0, 2):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy(), logger=False)
        with pytest.raises(
            ValueError, match=rf"size of {devices},.*in 2 processes.*same `devices`"
        ):
            L.Trainer(accelerator="cpu", devices=devices, strategy=strategy(), logger=False)


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, PipelineStrategy])
@pytest.mark.parametrize("backend", ["ncll", "nccl", "cpu:gloo,cuda:nccl", "undefined", "fake"])
def test_a_backend_that_takes_no_tensors_of_the_device_is_refused(
    strategy: Callable[..., DistributedStrategy], backend: str
) -> None:
    own = strategy(process_group_backend=backend)
    with pytest.raises(ValueError, match=rf"{backend}' is no backend.*'cpu'.*one of \['gloo'"):
        L.Trainer(accelerator="cpu", devices=2, strategy=own, logger=False)
    assert not dist.is_initialized()


GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("strategy", [TensorParallelStrategy, partial(MeshStrategy, tp=2)])
def test_gathers_that_would_crash_are_refused(
    strategy: Callable[..., DistributedStrategy],
) -> None:
    own = strategy(process_group_backend="gloo", **on_two_gpus())
    with pytest.raises(
        ValueError, match=r"'gloo' with tp_size=2 on a 'cuda' .*pytorch#152645.*None"
    ):
        own.set_world_ranks()


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        (FSDPStrategy, "gloo"),
        (partial(MeshStrategy, pp=2), "gloo"),
        (partial(TensorParallelStrategy, tp_size=1), "gloo"),
        (TensorParallelStrategy, None),
    ],
)
def test_gathers_that_do_not_crash_are_taken(
    strategy: Callable[..., DistributedStrategy], backend: str | None
) -> None:
    strategy(process_group_backend=backend, **on_two_gpus()).set_world_ranks()


def on_two_gpus() -> dict[str, Any]:
    return {"parallel_devices": GPUS, "cluster_environment": LightningEnvironment()}

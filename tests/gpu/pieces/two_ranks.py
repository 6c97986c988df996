"""Two ranks on one GPU over NCCL: whether that works, and how fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.ranks import NCCL_ON_ONE_GPU, open_ranks
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.processes.workers import CaseFailedError

NUM_FLOATS, REPEATS = 1 << 20, 5
SECONDS = 60.0


def nccl(setting: Setting) -> Iterator[Row]:
    """Tries both ways in fresh processes, for a communicator that has failed may hang later."""
    plain, another = "two ranks of one host", "each rank another NCCL_HOSTID"
    for what, environment in ((another, NCCL_ON_ONE_GPU), (plain, {})):
        if not setting.is_gpu:
            yield Row(what, "NCCL has no CPU tensors; gloo instead", "", Verdict.LEFT_OUT)
        yield from _try(setting, what, environment)


def _try(setting: Setting, what: str, environment: dict[str, str]) -> Iterator[Row]:
    with open_ranks(setting) as ranks:
        try:
            collective, both_ways = ranks.run(
                2, exchange, environment=environment, timeout=SECONDS
            )[0]
        except CaseFailedError as error:
            yield Row(what, f"refused or hung: {_reason(str(error))}")
            return
    mib = NUM_FLOATS * 4 / 2**20
    yield Row(f"{what}, all-reduce of {mib:.0f} MiB", f"{collective * 1e3:.2f} ms")
    yield Row(f"{what}, {mib:.0f} MiB both ways at once", f"{both_ways * 1e3:.2f} ms")


def _reason(text: str) -> str:
    """Returns the line that says the most: NCCL's own, or else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Duplicate GPU" in line or "NCCL error" in line]
    return (telling or lines)[-1]


def exchange(setting: Setting) -> tuple[float, float]:
    """Sums and swaps tensors with the other rank; returns the seconds of each."""
    rank = int(os.environ["RANK"])
    device = setting.torch_device
    backend = "nccl" if setting.is_gpu else "gloo"
    identity = device if setting.is_gpu else None
    dist.init_process_group(backend, rank=rank, world_size=2, device_id=identity)
    ours = torch.full((NUM_FLOATS,), float(rank + 1), device=device)
    total = ours.clone()
    dist.all_reduce(total)
    assert bool((total == 3.0).all()), "the sum of 1 and 2 is another"

    def swap() -> torch.Tensor:
        theirs = torch.zeros_like(ours)
        both = [
            dist.P2POp(dist.isend, ours, 1 - rank),
            dist.P2POp(dist.irecv, theirs, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return theirs

    assert bool((swap() == 2.0 - rank).all()), "the other rank's tensor has arrived otherwise"
    return _seconds(setting, lambda: dist.all_reduce(total)), _seconds(setting, swap)


def _seconds(setting: Setting, work: Callable[[], Any]) -> float:
    dist.barrier()
    setting.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    setting.synchronize()
    return (time.perf_counter() - began) / REPEATS

"""Compressed gradients follow their own recursion exactly, not approximately."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import DDPStrategy
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from tests.helpers.networks.models import (
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 48
POWERSGD = {"powersgd_rank": 1, "powersgd_start_step": 2}


def fit(compression: Any, accumulate: int, **options: Any) -> dict[str, Tensor]:
    module = make_module()
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(compression=compression, **options),
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module)


def reference(dtype: torch.dtype, accumulate: int) -> dict[str, Tensor]:
    """Two replicas in one process, which exchange gradients of another type."""
    module = make_module()
    optimizer = make_optimizer("sgd", module.parameters())
    shares = [list(share_of(rank, NUM_SAMPLES)) for rank in range(2)]
    names = [n for n, _ in module.named_parameters()]

    def exchange(sums: list[list[Tensor]]) -> list[list[Tensor]]:
        halves = ([g.to(dtype) / 2 for g in of_rank] for of_rank in sums)
        mean = [(one + other).double() for one, other in zip(*halves, strict=True)]
        return [mean, mean]

    for start in range(0, len(shares[0]), accumulate):
        sums = [[torch.zeros_like(p) for p in module.parameters()] for _ in shares]
        for micro in range(start, min(start + accumulate, len(shares[0]))):
            for rank, (x, y) in enumerate(share[micro] for share in shares):
                loss = F.cross_entropy(module.model(x), y) / accumulate
                new = torch.autograd.grad(loss, [module.get_parameter(n) for n in names])
                sums[rank] = [a + b for a, b in zip(sums[rank], new, strict=True)]
        for parameter, gradient in zip(module.parameters(), exchange(sums)[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
    return state_of(module)


@pytest.mark.some("bf16-*-1-False")
@pytest.mark.parametrize(("accumulate", "static_graph"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(("compression", "dtype"), [("fp16", torch.half), ("bf16", torch.bfloat16)])
def test_half_precision_rounds_once_per_rank(
    workers: WorkerPool, compression: str, dtype: torch.dtype, accumulate: int, static_graph: bool
) -> None:
    expected = reference(dtype, accumulate)
    exact = reference(torch.float64, accumulate)
    for state in workers.run(2, fit_half, compression, accumulate, static_graph):
        for name, value in state.items():
            assert float((value - expected[name]).abs().max()) < 1e-12, name
    assert any(not torch.allclose(expected[n], exact[n], atol=1e-6) for n in exact)


def fit_half(compression: str, accumulate: int, static_graph: bool) -> dict[str, Tensor]:
    return fit(compression, accumulate, static_graph=static_graph)


def powersgd_loop(accumulate: int) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    never_destroy([dist.group.WORLD])  # as the strategy does, and for the same reason
    module = make_module()
    ddp = DistributedDataParallel(module.model)
    ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    )
    optimizer = make_optimizer("sgd", ddp.parameters())
    for index, (x, y) in enumerate(share_of(dist.get_rank(), NUM_SAMPLES)):
        is_update = (index + 1) % accumulate == 0
        with nullcontext() if is_update else ddp.no_sync():
            (F.cross_entropy(ddp(x), y) / accumulate).backward()
        if is_update:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(module)


@pytest.mark.some("2-True")
@pytest.mark.parametrize(("accumulate", "static_graph"), [(1, False), (2, False), (2, True)])
def test_powersgd_equals_a_plain_loop(
    workers: WorkerPool, accumulate: int, static_graph: bool
) -> None:
    expected = workers.run(2, powersgd_loop, accumulate)[0]
    exact = reference(torch.float64, accumulate)
    for state in workers.run(2, fit_powersgd, accumulate, static_graph):
        for name, value in state.items():
            assert float((value - expected[name]).abs().max()) < 1e-12, name
    assert any(not torch.allclose(expected[n], exact[n], atol=1e-6) for n in exact)


def fit_powersgd(accumulate: int, static_graph: bool) -> dict[str, Tensor]:
    return fit("powersgd", accumulate, static_graph=static_graph, **POWERSGD)


def fit_in_buckets() -> dict[str, Tensor]:
    """Trains with a bucket of about each layer, whose factors wait for those of another rank."""
    module = make_module()
    options = {**POWERSGD, "bucket_megabytes": 1e-4}
    trainer = make_trainer(devices=2, strategy=DDPStrategy(compression="powersgd", **options))
    trainer.fit(module, share_of(int(os.environ["RANK"]), 4 * NUM_SAMPLES), make_loader(8))
    return state_of(module)


def test_powersgd_keeps_buckets_apart(workers: WorkerPool) -> None:
    one, other = workers.run(2, fit_in_buckets)
    assert all(torch.equal(one[name], other[name]) for name in one)


def count_buckets(accumulate: int, static_graph: bool) -> int:
    """Counts the buckets that a rank hands over for six batches."""
    hooks, count = default_hooks, 0
    original = hooks.fp16_compress_hook

    def counting(group, bucket):  # type: ignore[no-untyped-def]  # torch would not like strings
        nonlocal count
        count += 1
        return original(group, bucket)

    hooks.fp16_compress_hook = counting
    try:
        fit("fp16", accumulate, static_graph=static_graph)
    finally:
        hooks.fp16_compress_hook = original
    return count


@pytest.mark.parametrize(
    ("accumulate", "static_graph", "expected"),
    [(1, False, 6), (3, False, 2), (3, True, 2)],
    ids=["each batch", "accumulated", "accumulated, static graph"],
)
def test_no_gradient_travels_while_they_accumulate(
    workers: WorkerPool, accumulate: int, static_graph: bool, expected: int
) -> None:
    assert workers.run(2, count_buckets, accumulate, static_graph) == [expected] * 2

"""Gradients in fewer bytes follow their own recursions, written out for replicas in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.data_parallel.error_feedback import Int8
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_layers,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES, FRACTION, BLOCK = 96, 0.1, 256
Exchange = Callable[[list[list[Tensor]]], list[Tensor]]
"""Averages the gradients of all replicas, each a list by parameter; None if none has one."""


def fit(
    compression: Any, count: int, bucket_megabytes: float, module: Any = None
) -> dict[str, Tensor]:
    module = module or make_module()
    options = {"topk_fraction": FRACTION, "bucket_megabytes": bucket_megabytes}
    trainer = make_trainer(devices=count, strategy=DDPStrategy(compression, **options))
    share = share_of(int(os.environ["RANK"]), NUM_SAMPLES, count)
    trainer.fit(module, share, make_loader(8))
    return state_of(module)


def recursion(count: int, exchange: Exchange) -> dict[str, Tensor]:
    module = make_module()
    optimizer = make_optimizer("sgd", module.parameters())
    for batches in zip(*(share_of(rank, NUM_SAMPLES, count) for rank in range(count)), strict=True):
        step(optimizer, [F.cross_entropy(module.model(x), y) for x, y in batches], exchange)
    return state_of(module)


def step(optimizer: Any, losses: list[Tensor], exchange: Exchange) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients: Any = [torch.autograd.grad(e, parameters, allow_unused=True) for e in losses]
    for parameter, mean in zip(parameters, exchange(gradients), strict=True):
        parameter.grad = mean
    optimizer.step()


def plain(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).mean(0) for same in zip(*gradients, strict=True)]


def largest_elements(*, feeds_back: bool = True) -> Exchange:
    lost: dict[tuple[int, int], Tensor] = {}

    def exchange(gradients: list[list[Any]]) -> list[Any]:
        means: list[Any] = []
        for number, same in enumerate(zip(*gradients, strict=True)):
            used = next((gradient for gradient in same if gradient is not None), None)
            if used is None:
                means.append(None)
                continue
            mean = torch.zeros_like(used)
            for rank, gradient in enumerate(same):
                wanted = torch.zeros_like(used) if gradient is None else gradient / len(same)
                if feeds_back:
                    wanted = wanted + lost.get((rank, number), 0.0)
                count = max(1, round(FRACTION * wanted.numel()))
                least = wanted.abs().flatten().sort(descending=True).values[count - 1]
                sent = wanted.where(wanted.abs() >= least, 0.0)
                lost[rank, number] = wanted - sent
                mean += sent
            means.append(mean)
        return means

    return exchange


def rounded(values: Tensor) -> Tensor:
    blocks = values.view(-1, BLOCK)
    steps = (blocks.abs().amax(1, keepdim=True) / 127).float().double()
    return ((blocks / steps.where(steps > 0, 1.0)).round() * steps).view_as(values)


def fit_int8(count: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Trains; returns also the order of the parameters in the bucket of each step."""
    orders: list[list[int]] = []
    module = make_module()
    numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
    send = Int8.send

    def noted(self: Int8, bucket: Any, flat: Tensor, pieces: tuple[Tensor, ...]) -> Any:
        orders.append([numbers[parameter] for parameter in bucket.parameters()])
        return send(self, bucket, flat, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8, "send", noted)
        return fit("int8", count, 25.0, module), orders


def integers(orders: list[list[int]], *, feeds_back: bool = True) -> Exchange:
    """As ``"int8"`` averages a bucket of all parameters, which has an order in each step."""
    lost: list[dict[int, Tensor]] = []
    steps = iter(orders)

    def exchange(gradients: list[list[Tensor]]) -> list[Tensor]:
        count, order = len(gradients), next(steps)
        wanted = [{n: own[n].flatten() / count for n in order} for own in gradients]
        if feeds_back and lost:
            wanted = [
                {n: of[n] + rest[n] for n in of} for of, rest in zip(wanted, lost, strict=True)
            ]
        flats = [torch.cat(list(of.values())) for of in wanted]
        share = -(-len(flats[0]) // (count * BLOCK)) * BLOCK
        flats = [F.pad(flat, (0, share * count - len(flat))) for flat in flats]
        sent = [rounded(flat) for flat in flats]
        mean = sum(sent)
        received = rounded(mean)
        left = [flat - of_rank for flat, of_rank in zip(flats, sent, strict=True)]
        for rank in range(count):
            own = slice(rank * share, (rank + 1) * share)
            left[rank][own] += (mean - received)[own]
        lost[:] = [by_parameter(flat, gradients[0], order) for flat in left]
        means = by_parameter(received, gradients[0], order)
        return [means[n].view_as(g) for n, g in enumerate(gradients[0])]

    return exchange


def by_parameter(flat: Tensor, like: list[Tensor], order: list[int]) -> dict[int, Tensor]:
    sizes = [like[n].numel() for n in order]
    return dict(zip(order, flat[: sum(sizes)].split(sizes), strict=True))


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.some("25.0")
@pytest.mark.parametrize("bucket_megabytes", [25.0, 1e-4])
def test_topk_equals_its_recursion(workers: WorkerPool, bucket_megabytes: float) -> None:
    expected = recursion(2, largest_elements())
    for state in workers.run(2, fit, "topk", 2, bucket_megabytes):
        assert difference(state, expected) < 1e-12
    for other in (plain, largest_elements(feeds_back=False)):
        assert difference(recursion(2, other), expected) > 1e-4


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_int8_equals_its_recursion(workers: WorkerPool, count: int) -> None:
    results = workers.run(count, fit_int8, count)
    orders = results[0][1]
    expected = recursion(count, integers(orders))
    for state, _ in results:
        assert difference(state, expected) < 1e-12
    for other in (plain, integers(orders, feeds_back=False)):
        assert difference(recursion(count, other), expected) > 1e-6


def test_buckets_are_kept_apart(workers: WorkerPool) -> None:
    one, other = workers.run(2, fit, "int8", 2, 1e-4)
    assert difference(one, other) == 0.0


class Spectral(Classifier):
    """Has complex weights, and real ones in the same network."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.weight = nn.Parameter(torch.randn(2, 4, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        filtered = torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=6)
        return F.cross_entropy(self.model(filtered), y)


def fit_complex(compression: Any, topk_fraction: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(7)
    module = Spectral()
    strategy = DDPStrategy(compression, topk_fraction=topk_fraction)
    trainer = make_trainer(devices=2, strategy=strategy, limit_val_batches=0)
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module)


@pytest.mark.some("int8-0.01")
@pytest.mark.parametrize(("compression", "at_most"), [("topk", 1e-5), ("int8", 1e-2)])
def test_complex_gradients_lose_no_part(
    workers: WorkerPool, compression: str, at_most: float
) -> None:
    expected, _ = workers.run(2, fit_complex, "none")
    one, other = workers.run(2, fit_complex, compression)
    assert difference(one, other) == 0.0
    assert difference(one, expected) < at_most
    few, _ = workers.run(2, fit_complex, "topk", FRACTION)
    assert at_most < difference(few, expected)


def fit_fp16(compression: Any) -> dict[str, Tensor]:
    """Trains with a loss scale that overflows in the first step, and is right from some step on."""
    module = make_module().float()
    x, y = make_data(NUM_SAMPLES).tensors
    own = slice(int(os.environ["RANK"]), None, 2)
    trainer = make_trainer(
        devices=2,
        strategy=DDPStrategy(compression, topk_fraction=FRACTION),
        callbacks=[MixedPrecision("fp16", initial_scale=2.0**24)],
        limit_val_batches=0,
    )
    data = TensorDataset(x[own].float(), y[own])
    trainer.fit(module, DataLoader(data, batch_size=4), make_loader(8))
    return state_of(module)


@pytest.mark.some("int8")
@pytest.mark.parametrize("compression", ["topk", "int8"])
def test_an_overflow_leaves_nothing(workers: WorkerPool, compression: str) -> None:
    start = state_of(make_module().float())
    one, other = workers.run(2, fit_fp16, compression)
    assert difference(one, other) == 0.0
    assert all(bool(value.isfinite().all()) for value in one.values())
    assert difference(one, start) > 1e-3


class Turns(Classifier):
    """Trains two networks in turn, and leaves the gradients of the other one where they are."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.automatic_optimization = False
        self.other = make_layers(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for network, optimizer in zip((self.model, self.other), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(network(x), y))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [make_optimizer("sgd", n.parameters()) for n in (self.model, self.other)]


class Heads(Classifier):
    """Has a head for both ranks' batches, and one for each, of which some batches use the other."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def loss_of(self, rank: int, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        head = (rank, 1 - rank, 2, 3)[batch_idx % 4]
        return F.cross_entropy(self.heads[head](self.model(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(int(os.environ["RANK"]), batch, batch_idx)


def fit_unused(compression: Any, module_class: Any = Turns) -> dict[str, Tensor]:
    options = {"topk_fraction": FRACTION, "find_unused_parameters": True}
    module = make_module(module_class)
    trainer = make_trainer(devices=2, strategy=DDPStrategy(compression, **options))
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module)


def turns() -> dict[str, Tensor]:
    """As one run for each network: what its gradients have lost waits for its next turn."""
    module = make_module(Turns)
    for network in (module.model, module.other):
        optimizer, exchange = make_optimizer("sgd", network.parameters()), largest_elements()
        for batches in zip(*(share_of(rank, NUM_SAMPLES) for rank in range(2)), strict=True):
            step(optimizer, [F.cross_entropy(network(x), y) for x, y in batches], exchange)
    return state_of(module)


def heads() -> dict[str, Tensor]:
    module = make_module(Heads)
    optimizer, exchange = make_optimizer("sgd", module.parameters()), largest_elements()
    shares = (share_of(rank, NUM_SAMPLES) for rank in range(2))
    for index, batches in enumerate(zip(*shares, strict=True)):
        losses = [module.loss_of(rank, batch, index) for rank, batch in enumerate(batches)]
        step(optimizer, losses, exchange)
    return state_of(module)


@pytest.mark.parametrize(("module_class", "expected"), [(Turns, turns), (Heads, heads)])
def test_topk_leaves_what_no_rank_uses_alone(
    workers: WorkerPool, module_class: Any, expected: Callable[[], dict[str, Tensor]]
) -> None:
    for state in workers.run(2, fit_unused, "topk", module_class):
        assert difference(state, expected()) < 1e-12


def test_int8_leaves_what_no_rank_uses_alone(workers: WorkerPool) -> None:
    whole, _ = workers.run(2, fit_unused, "none")
    one, other = workers.run(2, fit_unused, "int8")
    assert difference(one, other) == 0.0
    assert difference(one, whole) < 1e-3

"""Ways to train the same GPT on some processes, each returning seconds per batch on its rank."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.engine.schedules.registry import find_family
from recipes.gpt import GPT, build_gpt
from recipes.text import load_text, split_text
from tests.benchmarks.quiet import QUIET_TRAINER

RunBatch = Callable[[Tensor, Tensor], None]
"""Trains on inputs and targets."""

WIDTH, DEPTH, HEADS = 256, 8, 4
BATCH, LENGTH = 8, 128
WARMUP = 4
CUT = [5, 5]
CUT_IN_FOUR = [3, 2, 2, 3]
# torch's class for one stage per rank of its interleaved zero bubble is ZB-H1.
LISTED = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def batches(count: int, size: int = BATCH) -> TensorDataset:
    """Real text, always the same; from its beginning again where it ends."""
    text, length = split_text(load_text())[0], count * size * LENGTH + 1
    text = text.repeat(math.ceil(length / len(text)))[:length]
    return TensorDataset(text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return build_gpt(width=WIDTH, depth=DEPTH, num_heads=HEADS)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def timed_loop(count: int, run: RunBatch, size: int = BATCH) -> float:
    loader = DataLoader(batches(count + WARMUP, size), batch_size=size)
    start = 0.0
    for index, (x, y) in enumerate(loader):
        if index == WARMUP:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
        run(x, y)
    return (time.perf_counter() - start) / count


def ratio(reference: list[float], own: list[float]) -> str:
    """Gives the throughput beside another's: the median over the rounds, neighbours in time."""
    rounds = [theirs / seconds for theirs, seconds in zip(reference, own, strict=False)]
    return f"{statistics.median(rounds):.3f}" if rounds else "-"


# --- without Lightning ---------------------------------------------------------------------------


def one_process(rank: int, count: int) -> float:
    if rank:
        dist.barrier()
        return 0.0
    net = model()
    optimizer = adamw(net.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        loss_of(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed_loop(count, run)


def ideal(rank: int, count: int) -> float:
    """Two processes that each train their own stage and never speak."""
    return timed_loop(count, ideal_loop(rank))


def ideal_loop(rank: int) -> RunBatch:
    """Trains a stage on what no other one has made."""
    layers = list(model())
    stage = nn.Sequential(*(layers[: CUT[0]] if rank == 0 else layers[CUT[0] :]))
    optimizer = adamw(stage.parameters())
    activation = torch.randn(BATCH, LENGTH, WIDTH)

    def run(x: Tensor, y: Tensor) -> None:
        if rank == 0:
            out = stage(x)
            out.backward(activation)
        else:
            loss_of(stage(activation.detach().requires_grad_()), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def pipelining_loop(rank: int, schedule: type, num_microbatches: int) -> RunBatch:
    layers = list(model())
    module = nn.Sequential(*(layers[: CUT[0]] if rank == 0 else layers[CUT[0] :]))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    pipeline = schedule(stage, num_microbatches, loss_fn=loss_of)
    optimizer = adamw(module.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        if rank == 0:
            pipeline.step(x)
        else:
            pipeline.step(target=y)
        optimizer.step()
        optimizer.zero_grad()

    return run


def torch_gpipe(rank: int, count: int, num_microbatches: int) -> float:
    return timed_loop(count, pipelining_loop(rank, ScheduleGPipe, num_microbatches))


def torch_1f1b(rank: int, count: int, num_microbatches: int) -> float:
    return timed_loop(count, pipelining_loop(rank, Schedule1F1B, num_microbatches))


def torch_listed(rank: int, count: int, name: str, num_microbatches: int) -> float:
    return timed_loop(count, listed_loop(rank, name, num_microbatches))


def listed_loop(rank: int, name: str, num_microbatches: int) -> RunBatch:
    """Runs one of torch's schedules that take a list of stages."""
    homes = find_family(name).rank_of_stage(2)
    layers = iter(model())
    cuts = CUT if len(homes) == 2 else CUT_IN_FOUR
    modules = [nn.Sequential(*islice(layers, size)) for size in cuts]
    own = [number for number, home in enumerate(homes) if home == rank]
    device = torch.device("cpu")
    stages = [PipelineStage(modules[number], number, len(homes), device) for number in own]
    pipeline = LISTED[name](stages, num_microbatches, loss_fn=loss_of)
    optimizer = adamw(p for number in own for p in modules[number].parameters())

    def run(x: Tensor, y: Tensor) -> None:
        given = (x,) if 0 in own else ()
        target = {"target": y} if len(homes) - 1 in own else {}
        pipeline.step(*given, **target)
        optimizer.step()
        optimizer.zero_grad()

    return run


# --- inside Lightning ----------------------------------------------------------------------------


class PlainGPT(GPT):
    """The recipe's module with the optimizer of the other contestants."""

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Stopwatch(L.Callback):
    """Times from the end of the warm-up to the end of training, drain included."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == WARMUP:
            self.start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seconds = (time.perf_counter() - self.start) / self.count


def in_lightning(
    strategy: Any,
    count: int,
    size: int = BATCH,
    module_class: type[PlainGPT] = PlainGPT,
    accumulate: int = 1,
    devices: int = 2,
) -> float:
    watch = Stopwatch(count)
    fit(strategy, count + WARMUP, watch, size, module_class, accumulate, devices)
    return watch.seconds


def fit(
    strategy: Any,
    count: int,
    callback: L.Callback,
    size: int,
    module_class: type[PlainGPT],
    accumulate: int,
    devices: int,
) -> None:
    torch.manual_seed(0)
    module = module_class(width=WIDTH, depth=DEPTH, num_heads=HEADS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[callback],
        **QUIET_TRAINER,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
    )
    data = batches(count, size)
    trainer.fit(module, DataLoader(data, batch_size=size), DataLoader(data, batch_size=size))


def ours(rank: int, count: int, schedule: str, num_microbatches: int | str) -> float:
    return in_lightning(our_pipeline(schedule, num_microbatches), count)


def our_pipeline(schedule: str, num_microbatches: int | str, **options: Any) -> PipelineStrategy:
    cut = CUT if len(find_family(schedule).rank_of_stage(2)) == 2 else CUT_IN_FOUR
    return PipelineStrategy(
        schedule=schedule, num_microbatches=num_microbatches, partition=cut, **options
    )

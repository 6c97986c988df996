"""What the engine costs: two stages on one rank beside a loop over the same micro-batches."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape
from recipes.gpt import build_gpt
from tests.benchmarks.contestants import loss_of
from tests.gpu.pieces.in_process import NUM_MICROBATCHES, update
from tests.gpu.ranks import attempt, beside_goal
from tests.gpu.records import Row
from tests.gpu.setting import Setting


@dataclass(frozen=True)
class Sizes:
    """A GPT and its batch."""

    width: int
    depth: int
    heads: int
    batch: int
    length: int
    turns: int


ON_GPU = Sizes(width=768, depth=12, heads=12, batch=8, length=512, turns=15)
ON_CPU = Sizes(width=32, depth=2, heads=2, batch=4, length=16, turns=3)
TURN, GOAL = 4, 0.95


def overhead(setting: Setting) -> Iterator[Row]:
    """Times two stages of this process beside a loop over the same micro-batches, in turns."""
    for schedule in ("interleaved_1f1b", "looped_bfs", "zbv"):
        what = f"2 stages in one process, {schedule}"
        yield attempt(what, partial(_overhead_row, what, setting, schedule))


def _overhead_row(what: str, setting: Setting, schedule: str) -> Row:
    sizes = ON_GPU if setting.is_gpu else ON_CPU
    device = setting.torch_device
    torch.manual_seed(0)
    net = build_gpt(width=sizes.width, depth=sizes.depth, num_heads=sizes.heads).to(device)
    shape = (2, sizes.batch, sizes.length)
    x, y = torch.randint(256, shape, device=device)
    raw = _raw_loop(copy.deepcopy(net), x, y)
    half = len(net) // 2
    rank = PipelineShape(
        schedule, NUM_MICROBATCHES, (half, len(net) - half), rank=0, stages_per_rank=2
    )
    (links,) = connect_in_memory((0, 0))
    pipeline = Pipeline(net, rank, links, StageOptions(device=device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step(microbatch: Any) -> Tensor:
        inputs, targets = microbatch.content
        return loss_of(net(inputs), targets)

    def ours() -> None:
        pipeline.train_batch((x, y), step)
        update(pipeline, optimizer)

    times = [(seconds(setting, raw), seconds(setting, ours)) for _ in range(sizes.turns + 2)][2:]
    ratio = statistics.median(theirs / own for theirs, own in times)
    own, theirs = statistics.median(o for _, o in times), statistics.median(t for t, _ in times)
    found = f"{own * 1e3:.2f} ms per batch, loop {theirs * 1e3:.2f}; {ratio:.3f} x the loop"
    return beside_goal(what, found, setting, ratio, GOAL)


def _raw_loop(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        pieces = zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
        for inputs, targets in pieces:
            (loss_of(net(inputs), targets) / NUM_MICROBATCHES).backward()
        optimizer.step()

    return run


def seconds(setting: Setting, run: Callable[[], None]) -> float:
    """Returns the time of a batch, of some in a row."""
    setting.synchronize()
    began = time.perf_counter()
    for _ in range(TURN):
        run()
    setting.synchronize()
    return (time.perf_counter() - began) / TURN

"""Greedy generation: ``python -m tests.benchmarks.generation`` prints tokens per second.

One process with and without the cache, and two stages with one to four micro-batches, each process
on one thread. The ways take turns in each round; ratios are of the same round.

With ``--sleeping`` each block sleeps for a time in proportion to the prompts, and computes next to
nothing. That shows which work overlaps, also where other work has the cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recipes.generate import generate, generate_in_stages
from recipes.gpt import build_gpt
from tests.helpers.processes.workers import free_port

SIZES = {"width": 384, "depth": 8, "num_heads": 8}
PROMPTS = torch.randint(256, (48, 32), generator=torch.Generator().manual_seed(0))
FEW = PROMPTS[:4]  # without a cache each token takes as long as all those before
NUM_TOKENS = 24
ROUNDS = 5


@torch.no_grad()
def generate_anew(model: torch.nn.Module) -> torch.Tensor:
    """Computes all positions again for each token."""
    tokens = FEW
    for _ in range(NUM_TOKENS):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens[:, FEW.shape[1] :]


class Sleeping(torch.nn.Sequential):
    """A layer that takes 20 ms for each prompt."""

    def forward(self, x: torch.Tensor) -> Any:
        """Sleeps, and calls its layer."""
        time.sleep(0.02 * len(x))
        return super().forward(x)


def measure(rank: int, port: int, is_sleeping: bool) -> None:
    """Runs both ranks; rank 0 prints."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    prompts = FEW if is_sleeping else PROMPTS
    if is_sleeping:
        first, *blocks, last = build_gpt(width=16, depth=2, num_heads=2)
        model = torch.nn.Sequential(first, *map(Sleeping, blocks), last)
    else:
        model = build_gpt(**SIZES)
    half = len(model) // 2
    stage = model[:half] if rank == 0 else model[half:]

    def alone(run: Callable[[], Any]) -> None:
        if rank == 0:
            run()

    def staged(num_microbatches: int) -> Callable[[], Any]:
        return lambda: generate_in_stages(stage, prompts, NUM_TOKENS, num_microbatches)

    ways: dict[str, Callable[[], Any]] = {
        "few prompts, no cache": lambda: alone(lambda: generate_anew(model)),
        "few prompts, cache": lambda: alone(lambda: generate(model, FEW, NUM_TOKENS)),
        "one process": lambda: alone(lambda: generate(model, prompts, NUM_TOKENS)),
        **{f"2 stages, {m} micro-batches": staged(m) for m in (1, 2, 4)},
    }
    if is_sleeping:
        ways = {name: run for name, run in ways.items() if not name.startswith("few")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(ROUNDS + 1):
        for name, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if round_index:  # the first warms up
                seconds[name].append(time.perf_counter() - begin)
    dist.destroy_process_group()
    if rank:
        return
    print(f"{len(prompts)} ('few': {len(FEW)}) prompts of 32 bytes, {NUM_TOKENS} new ones")
    for name, found in seconds.items():
        num_prompts = len(FEW) if name.startswith("few") else len(prompts)
        rate = num_prompts * NUM_TOKENS / statistics.median(found)
        base = seconds["few prompts, no cache" if name.startswith("few") else "one process"]
        ratios = sorted(b / f for b, f in zip(base, found, strict=True))
        spread = f"x {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name:26} {rate:8,.0f} tokens/s   {spread}")


if __name__ == "__main__":
    mp.spawn(measure, (free_port(), "--sleeping" in sys.argv), nprocs=2)

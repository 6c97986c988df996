"""Peak memory of a rank, measured, beside the formula: ``python -m tests.benchmarks.memory``.

glibc knows the most bytes that were mapped at a time, by all threads, gloo's too. Large blocks are
made to be mapped, each on its own, and given back when they are freed; so the difference to what
was mapped before the model is what its training needs. (The profiler's running total does not see
what gloo's threads free.) The formula takes the activations from a run of the
model on one process; everything else in it is counted. Each case has fresh processes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.engine.planning.memory import (
    RankMemory,
    TrainedPart,
    pipelined,
    replicated,
    sharded,
)
from lightning_dist.engine.sharding.recompute import checkpoint_activations
from recipes.gpt import Block, build_gpt
from tests.benchmarks.contestants import PlainGPT, batches, loss_of
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.helpers.processes.workers import WorkerPool

WIDTH, DEPTH, HEADS = 384, 8, 4
ROWS, STEPS = 2, 4
CUT = [5, 5]
MMAP_THRESHOLD, SMALLEST_MAPPED = -3, 1 << 16
MIB = 2**20


# --- what glibc counts ---------------------------------------------------------------------------


class Heap(ctypes.Structure):
    """``struct mallinfo2``; ``hblkhd`` is what is mapped now."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def map_large_blocks() -> None:
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, SMALLEST_MAPPED)


def mapped_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    return int(mallinfo().hblkhd)


def peak_mapped_bytes() -> int:
    """Reads what ``malloc_stats`` prints; no other call tells the peak."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            ctypes.CDLL(None).malloc_stats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = re.search(rb"max mmap bytes\s*=\s*(\d+)", file.read())
    assert found is not None, "this needs glibc"
    return int(found[1])


def peak_of(run: Callable[[], Any]) -> int:
    """Tells how many bytes a run needs more than are there before; once per process."""
    map_large_blocks()
    before = mapped_bytes()
    run()
    return peak_mapped_bytes() - before


def known_case() -> int:
    """Holds five tensors of 4 MiB at a time, then fewer, then again five."""

    def run() -> None:
        for _ in range(3):
            kept = [torch.zeros(MIB) for _ in range(4)]
            kept.append(kept[0] + 1)
            del kept

    return peak_of(run)


def build(depth: int) -> nn.Sequential:
    return build_gpt(width=WIDTH, depth=depth, num_heads=HEADS)


# --- one rank ------------------------------------------------------------------------------------


class LateGPT(PlainGPT):
    """Is built in ``configure_model``, without its memory where the strategy can do so."""

    def __init__(self, depth: int) -> None:
        L.LightningModule.__init__(self)
        self.depth = depth
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.depth)


def train(strategy: Any, world_size: int, depth: int, accumulate: int) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=1,
        **QUIET_TRAINER,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(LateGPT(depth), DataLoader(batches(STEPS, ROWS), batch_size=ROWS))


def on_rank(
    make: Callable[..., Any], options: dict[str, Any], world_size: int, depth: int, accumulate: int
) -> tuple[int, tuple[int, int]]:
    """Gives the measured peak, and the two sizes that FSDP's formula asks for."""
    quieten()
    strategy = make(**options)
    peak = peak_of(lambda: train(strategy, world_size, depth, accumulate))
    if not isinstance(strategy, FSDPStrategy):
        return peak, (0, 0)
    summary = strategy.describe()
    return peak, (summary.peak_whole_bytes, max(row.num_bytes for row in summary.rows))


def activations(depth: int, stage: slice, rows: int, checkpointing: str) -> int:
    """Measures a forward and backward of some layers on one process, without gradients."""
    layers = build(depth)[stage]
    if checkpointing != "none":
        blocks = [layer for layer in layers if isinstance(layer, Block)]
        checkpoint_activations(blocks, keep_products=checkpointing == "selective")

    def forget(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(forget)
    x, y = (tensor[:rows] for tensor in batches(1, rows)[:])
    if stage.start:
        x = torch.randn(*x.shape, WIDTH, requires_grad=True)

    def run() -> None:
        out: Tensor = layers(x)
        loss = loss_of(out, y) if stage.stop == depth + 2 else out.sum()
        del out
        loss.backward()

    return peak_of(run)


# --- all cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A strategy, its ranks, the model's depth, and batches per update."""

    strategy: Callable[..., Any]
    world_size: int = 2
    depth: int = DEPTH
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "DDP, 2 ranks": Case(DDPStrategy),
    "DDP, 2 ranks, 2 batches per update": Case(DDPStrategy, accumulate=2),
    "FSDP, 2 ranks": Case(FSDPStrategy),
    "FSDP, 4 ranks": Case(FSDPStrategy, 4),
    'FSDP, 4 ranks, shard="gradients"': Case(FSDPStrategy, 4, options={"shard": "gradients"}),
    'FSDP, 4 ranks, shard="optimizer"': Case(FSDPStrategy, 4, options={"shard": "optimizer"}),
    "FSDP, 4 ranks, 2 blocks only": Case(FSDPStrategy, 4, depth=2),
    "HSDP, 2 x 2 ranks": Case(FSDPStrategy, 4, options={"shard_size": 2}),
    'FSDP, 2 ranks, offload="cpu" (nothing to gain on a CPU)': Case(
        FSDPStrategy, options={"offload": "cpu"}
    ),
    "FSDP, 2 ranks, checkpointing full": Case(
        FSDPStrategy, options={"activation_checkpointing": "full"}
    ),
    "FSDP, 2 ranks, checkpointing selective": Case(
        FSDPStrategy, options={"activation_checkpointing": "selective"}
    ),
    "pipeline 1f1b, 2 stages": Case(
        PipelineStrategy,
        options={"schedule": "1f1b", "num_microbatches": ROWS, "partition": CUT},
    ),
    "pipeline pipedream, 2 stages": Case(
        PipelineStrategy, options={"schedule": "pipedream", "partition": CUT}
    ),
}


def in_fresh_processes(world_size: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    workers = WorkerPool()
    try:
        return workers.run(world_size, run, *arguments, timeout=300)
    finally:
        workers.close()


def trained_part(case: Case, stage: slice, rows: int) -> TrainedPart:
    checkpointing = case.options.get("activation_checkpointing", "none")
    (kept,) = in_fresh_processes(1, activations, case.depth, stage, rows, checkpointing)
    size = sum(parameter.nbytes for parameter in build(case.depth)[stage].parameters())
    return TrainedPart(size, kept)


def formula(case: Case, units: tuple[int, int]) -> RankMemory:
    """Counts the first rank."""
    if case.strategy is PipelineStrategy:
        in_flight, asynchronous = len(CUT), case.options["schedule"] == "pipedream"
        rows = ROWS if asynchronous else 1
        stage = trained_part(case, slice(0, CUT[0]), rows)
        return pipelined(stage, in_flight, in_flight if asynchronous else 1)
    model = trained_part(case, slice(0, case.depth + 2), ROWS)
    if case.strategy is DDPStrategy:
        return replicated(model, case.world_size, accumulates=case.accumulate > 1)
    return sharded(model, case.options.get("shard_size", case.world_size), *units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="cases whose name contains one of these, parted by |"
    )
    wanted = parser.parse_args().only.split("|")
    (known,) = in_fresh_processes(1, known_case)
    table = Table(
        title=f"MiB at the worst moment; GPT of width {WIDTH}, {ROWS} x 128 tokens, AdamW",
        caption=f"five tensors of 4 MiB are measured as {known / MIB:.2f} MiB",
    )
    table.add_column("")
    kinds = [kind.name for kind in fields(RankMemory)]
    for heading in (*kinds, "formula", "measured", "ratio"):
        table.add_column(heading.replace("_", "\n"), justify="right")
    cases = {name: case for name, case in CASES.items() if any(w in name for w in wanted)}
    for name, case in track(cases.items(), description="memory"):
        arguments = (case.strategy, case.options, case.world_size, case.depth, case.accumulate)
        measured, units = in_fresh_processes(case.world_size, on_rank, *arguments)[0]
        counted = formula(case, units)
        numbers = [*(getattr(counted, kind) for kind in kinds), counted.peak, measured]
        cells = [f"{number / MIB:.1f}" for number in numbers]
        table.add_row(name, *cells, f"{measured / counted.peak:.3f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

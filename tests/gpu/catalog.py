"""All pieces of ``make gpu``, most telling first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.gpu.pieces import (
    checkpoints,
    compiled,
    drawn,
    memory,
    no_sync,
    numerics,
    overhead,
    parity,
    profiling,
    speed,
    two_ranks,
)
from tests.gpu.records import Row
from tests.gpu.setting import Setting


@dataclass(frozen=True)
class Piece:
    """Something to find out.

    Attributes:
        title: What it finds out.
        run: Yields a row as soon as it is known.
        limit_seconds: When the piece is ended.
        is_timed: Whether it measures time, and so must have the device to itself.
    """

    title: str
    run: Callable[[Setting], Iterator[Row]]
    limit_seconds: int
    is_timed: bool = False


PIECES: Mapping[str, Piece] = MappingProxyType(
    {
        "two_ranks": Piece(
            "whether NCCL takes two ranks on one GPU", two_ranks.nccl, 150, is_timed=True
        ),
        "parity_1": Piece("each strategy on one rank beside one device", parity.one_rank, 240),
        "parity_2": Piece("each strategy on two ranks beside one device", parity.two_ranks, 300),
        "drawn": Piece("runs drawn at random beside one device", drawn.drawn, 240),
        "no_sync": Piece(
            "whether the host waits for the device in a steady step", no_sync.no_sync, 120
        ),
        "no_sync_fits": Piece("the same under Lightning, on one rank", no_sync.in_fits, 90),
        "gpt": Piece(
            "the recipe's GPT at 124 M parameters beside a plain compiled loop",
            speed.gpt,
            420,
            is_timed=True,
        ),
        "speed": Piece(
            "a small GPT at one rank beside a raw loop", speed.small, 240, is_timed=True
        ),
        "memory": Piece("peak memory beside the planner's prediction", memory.planner, 180),
        "profiler": Piece(
            "StepProfiler: its times, MFU and overhead", profiling.profiler, 150, is_timed=True
        ),
        "half": Piece("bf16 and fp16 beside a plain loop", numerics.half_precision, 240),
        "compiled": Piece(
            "torch.compile of layers and stages under each schedule", compiled.compiled, 400
        ),
        "overhead": Piece(
            "what the engine costs: 2 stages in one process", overhead.overhead, 150, is_timed=True
        ),
        "optimizers": Piece("fused and capturable AdamW", numerics.optimizers, 180),
        "recompute": Piece("activation checkpointing: weights and bytes", memory.recompute, 120),
        "offload": Piece("shards on the host: weights and bytes", memory.offload, 120),
        "batch_norm": Piece("SyncBatchNorm over two replicas", numerics.batch_norm, 90),
        "deterministic": Piece("deterministic mode, twice", numerics.deterministic, 150),
        "checkpoints": Piece(
            "times of saves and loads", checkpoints.checkpoints, 180, is_timed=True
        ),
    }
)

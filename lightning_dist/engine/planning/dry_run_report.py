"""The bytes that the ranks of a mesh would hold and send, as numbers and as text.

On a large mesh most ranks are alike: ranks along the data and tensor-parallel axes hold equal
shards, and stages with equal layers do too. So there is one row for each kind of rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.table import draw_table, format_bytes
from lightning_dist.engine.planning.traffic import Traffic


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold and send the same, in a training step: their stages, number and bytes."""

    stages: tuple[int, ...]
    num_ranks: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    traffic: tuple[Traffic, ...]

    @property
    def held_bytes(self) -> int:
        """Bytes that stay from step to step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes


@dataclass(frozen=True, slots=True)
class DryRunSummary:
    """The bytes that each rank of a mesh would hold and send; as text, two tables.

    Attributes:
        mesh: Sizes of the mesh.
        kinds: Kinds of ranks, in the order of their first stages.
        rank_of_stage: The rank of each stage, in the pipeline.
    """

    mesh: MeshShape
    kinds: tuple[RankKind, ...]
    rank_of_stage: tuple[int, ...]

    def kind_of(self, rank: int) -> RankKind:
        """Returns the kind of a global rank."""
        stage = self.rank_of_stage.index(self.mesh.coordinates(rank)["pp"])
        return next(kind for kind in self.kinds if stage in kind.stages)

    def __str__(self) -> str:
        """Returns the tables as text."""
        held: list[tuple[str, ...]] = [
            ("stage", "ranks", "parameters", "gradients", "optimizer state", "in all")
        ]
        held += [_held(kind) for kind in self.kinds]
        sent: list[tuple[str, ...]] = [("stage", "in a step", "over", "count", "bytes")]
        sent += [_sent(kind, traffic) for kind in self.kinds for traffic in kind.traffic]
        tables = [draw_table(held, right=range(1, 6))]
        tables += [draw_table(sent, right=(3, 4))] if len(sent) > 1 else []
        return "\n\n".join(tables)


def collapse(kinds: Iterable[RankKind]) -> tuple[RankKind, ...]:
    """Merges equal kinds of ranks, given one per stage."""
    groups: dict[RankKind, list[RankKind]] = {}
    for kind in kinds:
        groups.setdefault(replace(kind, stages=(), num_ranks=0), []).append(kind)
    return tuple(
        replace(
            alike,
            stages=tuple(sorted(stage for kind in group for stage in kind.stages)),
            num_ranks=sum(kind.num_ranks for kind in group),
        )
        for alike, group in groups.items()
    )


def _held(kind: RankKind) -> tuple[str, ...]:
    sizes = (kind.parameter_bytes, kind.gradient_bytes, kind.optimizer_state_bytes, kind.held_bytes)
    return (_ranges(kind.stages), f"{kind.num_ranks:,}", *map(format_bytes, sizes))


def _sent(kind: RankKind, traffic: Traffic) -> tuple[str, ...]:
    over = " x ".join(traffic.axes)
    count, size = f"{traffic.count:,}", format_bytes(traffic.num_bytes)
    return (_ranges(kind.stages), traffic.kind.value, over, count, size)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Returns numbers as text, 0, 2, 3, 4 as ``0, 2-4``."""
    ends = [place for place, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    bounds = pairwise([0, *ends, len(numbers)])
    runs = [numbers[start:end] for start, end in bounds]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

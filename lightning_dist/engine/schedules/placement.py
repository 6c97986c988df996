"""The placement of a pipeline's stages on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Placement = Callable[[int, int], tuple[int, ...]]
"""Takes the numbers of ranks and of stages per rank; returns the rank of each stage."""


def looped(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the round-robin placement: stage ``s`` is on rank ``s % num_ranks``.

    Args:
        num_ranks: Number of ranks of the pipeline.
        stages_per_rank: Number of stages on each rank.
    """
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the V placement, which turns at each end.

    A rank's next stage receives from the neighbour to which its previous stage sends. With two
    stages per rank the first rank has both the first stage and the last one.

    Args:
        num_ranks: Number of ranks of the pipeline.
        stages_per_rank: Number of stages on each rank.
    """
    there = tuple(range(num_ranks))
    return sum((there[:: -1 if lap % 2 else 1] for lap in range(stages_per_rank)), start=())


@dataclass(frozen=True, slots=True)
class RankStages:
    """One rank's place in a pipeline.

    Attributes:
        rank: Index of the rank in the pipeline.
        num_ranks: Number of ranks of the pipeline.
        stages: The rank's stages in ascending order.
    """

    rank: int
    num_ranks: int
    stages: tuple[int, ...]


def rank_places(rank_of_stage: tuple[int, ...]) -> tuple[RankStages, ...]:
    """Returns each rank's place.

    Args:
        rank_of_stage: The rank of each stage.
    """
    num_ranks = max(rank_of_stage) + 1
    return tuple(
        RankStages(
            rank, num_ranks, tuple(s for s, home in enumerate(rank_of_stage) if home == rank)
        )
        for rank in range(num_ranks)
    )

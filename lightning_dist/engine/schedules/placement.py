"""Which stages a rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Placement = Callable[[int, int], tuple[int, ...]]
"""Takes ranks and stages per rank; gives the rank of each stage."""


def looped(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Deals the stages out like cards: stage ``s`` is on rank ``s % num_ranks``.

    Args:
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages on each.
    """
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Turns at each end, so that a rank has its next stage from the neighbour it sent to.

    The first rank has both the first stage and the last one of two.

    Args:
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages on each.
    """
    there = tuple(range(num_ranks))
    return sum((there[:: -1 if lap % 2 else 1] for lap in range(stages_per_rank)), start=())


@dataclass(frozen=True, slots=True)
class RankStages:
    """One rank's place in a pipeline.

    Attributes:
        rank: The rank, in the pipeline.
        num_ranks: Ranks of the pipeline.
        stages: Its stages in ascending order.
    """

    rank: int
    num_ranks: int
    stages: tuple[int, ...]


def seats(rank_of_stage: tuple[int, ...]) -> tuple[RankStages, ...]:
    """Gives each rank's place.

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

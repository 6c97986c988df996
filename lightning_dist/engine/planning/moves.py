"""Which layers change their rank when a pipeline is cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """A layer on its way.

    Attributes:
        layer_index: The layer.
        source: The rank that has it, in the pipeline.
        target: The rank that gets it.
    """

    layer_index: int
    source: int
    target: int


def find_moves(
    before: Sequence[int], after: Sequence[int], rank_of_stage: Sequence[int]
) -> tuple[Move, ...]:
    """Lists the layers that must be sent, in their order; the others stay where they are.

    Args:
        before: Layers per stage.
        after: Layers per stage, of as many layers and stages.
        rank_of_stage: The rank of each stage.
    """
    assert len(before) == len(after) == len(rank_of_stage)
    assert sum(before) == sum(after)
    pairs = zip(_homes(before, rank_of_stage), _homes(after, rank_of_stage), strict=True)
    return tuple(
        Move(layer, source, target)
        for layer, (source, target) in enumerate(pairs)
        if source != target
    )


def _homes(layers_per_stage: Sequence[int], rank_of_stage: Sequence[int]) -> list[int]:
    counts = zip(rank_of_stage, layers_per_stage, strict=True)
    return [rank for rank, count in counts for _ in range(count)]

"""The bytes that a rank of a mesh holds, with and without stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dist.engine.planning.memory import (
    RankMemory,
    TrainedPart,
    pipelined,
    replicated,
    sharded,
)
from lightning_dist.engine.schedules.actions import Action, ActionKind

Flights = frozenset[tuple[tuple[int, int], ...]]
"""Numbers of micro-batches in flight on each stage of a rank, at the moments with most of them."""


def memory_of_whole(
    sizes: Sequence[int], shard_size: int | None, activations: float, states: float
) -> RankMemory:
    """Returns the memory of a rank without stages, whose FSDP units are the layers.

    Args:
        sizes: Bytes of each layer's parameters.
        shard_size: Number of ranks that share them; None without FSDP.
        activations: Bytes of all activations.
        states: Bytes of optimizer state for each byte of parameters.
    """
    neighbours = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))
    part = TrainedPart(sum(sizes), round(activations))
    if shard_size is None:
        return _with_states(replicated(part, 1), states)
    return _with_states(sharded(part, shard_size, neighbours, max(sizes)), states)


def memory_of_part(
    parameters: int, shard_size: int, activations: float, states: float
) -> RankMemory:
    """Returns the memory of a rank with stages.

    Sharded stages hold parameters and accumulated gradients whole from the first micro-batch to the
    last.

    Args:
        parameters: Bytes of the parameters of all its stages.
        shard_size: Number of ranks that share them.
        activations: Bytes of the activations of all micro-batches in flight.
        states: Bytes of optimizer state for each byte of parameters.
    """
    if shard_size == 1:
        return _with_states(pipelined(TrainedPart(parameters, round(activations)), 1), states)
    share = -(-parameters // shard_size)
    kept = round(activations)
    memory = RankMemory(share, share, 0, kept, unsharded=parameters, buffers=parameters)
    return _with_states(memory, states)


def _with_states(memory: RankMemory, states: float) -> RankMemory:
    return replace(memory, optimizer_state=round(states * memory.parameters))


def count_flights(actions: Sequence[Action]) -> Flights:
    """Counts the micro-batches in flight after each forward of a rank, without repetitions."""
    present: dict[int, int] = {}
    found = set()
    for action in actions:
        change = (action.kind is ActionKind.FORWARD) - action.kind.ends_backward
        present[action.stage_index] = present.get(action.stage_index, 0) + change
        if change > 0:
            found.add(tuple(sorted(present.items())))
    return frozenset([max(found)] if len(present) == 1 else found)

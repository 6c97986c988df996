"""The bytes that a rank of a mesh holds, with and without stages.

Some moments are compared. In backwards there are all activations, and what an operation needs. An
update has temporary tensors. In its second forward DDP makes its buckets anew, in the order in
which gradients have come, while the old ones still hold the last gradients. And what averages the
gradients of stages, when activations are gone, copies them into messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dist.engine.planning.memory import (
    RankMemory,
    TrainedPart,
    pipelined,
    replicated,
    sharded,
)
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.messages import BUCKET_BYTES
from lightning_dist.engine.planning.search.model_costs import ModelCosts
from lightning_dist.engine.schedules.actions import Action, ActionKind

Flights = frozenset[tuple[tuple[int, int], ...]]
"""Numbers of micro-batches in flight on each stage of a rank, at the moments with most of them."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds besides parameters and gradients.

    Attributes:
        states: Bytes of optimizer state for each byte of parameters.
        activations: Bytes of the activations of all micro-batches in flight.
        backward: Bytes that a backward needs for a moment.
        update: Bytes that an update needs for a moment.
        messages: Bytes of activations and gradients on their way between stages.
    """

    states: float
    activations: float
    backward: float = 0.0
    update: float = 0.0
    messages: float = 0.0

    def added_to(self, memory: RankMemory, *, without_activations: int = 0) -> RankMemory:
        """Returns a rank's memory with all of this but the activations, which it has.

        Args:
            memory: The memory without it.
            without_activations: Bytes beside parameters, gradients and optimizer state at a moment
                without activations.
        """
        buffers = memory.buffers + round(self.messages)
        later = memory.activations + memory.unsharded + memory.buffers
        most = max(later + round(self.backward), round(self.update), without_activations)
        return replace(
            memory,
            optimizer_state=round(self.states * memory.parameters),
            buffers=buffers,
            temporary=most - later,
        )


def held_beside(
    costs: ModelCosts,
    layout: Layout,
    parameters: int,
    activations: float,
    backward: float,
    messages: float = 0.0,
) -> Held:
    """Returns what a rank holds besides parameters and gradients.

    Args:
        costs: Costs of the model.
        layout: The layout.
        parameters: Bytes of the rank's parameters, before they are sharded.
        activations: Bytes of the activations of all micro-batches in flight.
        backward: As in :class:`Held`.
        messages: As in :class:`Held`.
    """
    update = costs.update_bytes
    if costs.updates_together:
        update *= parameters / max(1, costs.parameter_bytes)
    return Held(
        costs.states_per_parameter,
        activations,
        backward=backward,
        update=min(update, 2.0 * parameters) / layout.mesh.dp_shard,
        messages=messages,
    )


def bytes_between_stages(layout: Layout, rank: int, boundary_bytes: float) -> float:
    """Returns the bytes of a rank's messages.

    For each rank beside it there are the last message to it, the last one from it, and memory for
    the next.
    """
    is_end = layout.stages_per_rank == 1 and rank in (0, layout.mesh.pp - 1)
    num_neighbours = 1 if is_end or layout.mesh.pp == 2 else 2
    return 3.0 * num_neighbours * boundary_bytes


def memory_of_whole(
    sizes: Sequence[int], shard_size: int | None, held: Held, *, num_replicas: int = 1
) -> RankMemory:
    """Returns the memory of a rank without stages, whose FSDP units are the layers.

    Args:
        sizes: Bytes of each layer's parameters.
        shard_size: Number of ranks that share them; None without FSDP.
        held: What else it holds.
        num_replicas: Number of ranks that average gradients, without FSDP.
    """
    units = [size for size in sizes if size] or [0]
    neighbours = max(map(sum, zip(units, [*units[1:], 0], strict=True)))
    part = TrainedPart(sum(sizes), round(held.activations))
    if shard_size is None:
        new_buckets = part.parameter_bytes if num_replicas > 1 else 0
        return held.added_to(replicated(part, 1), without_activations=new_buckets)
    return held.added_to(sharded(part, shard_size, neighbours, max(sizes)))


def memory_of_part(
    parameters: int, layout: Layout, held: Held, *, largest_unit: int = 0
) -> RankMemory:
    """Returns the memory of a rank with stages.

    Sharded stages hold parameters whole from the first micro-batch to the last, and accumulated
    gradients too; with a single micro-batch, a unit's gradients are sharded at once. Of two units
    at a time there are copies then. So there are of two buckets where stages have replicas.

    Args:
        parameters: Bytes of the parameters of all its stages.
        layout: The layout.
        held: What else it holds.
        largest_unit: Bytes of the parameters of its largest FSDP unit.
    """
    kept, mesh = round(held.activations), layout.mesh
    if mesh.dp_shard == 1:
        copies = min(parameters, 2 * BUCKET_BYTES) if mesh.dp_replicate > 1 else 0
        memory = pipelined(TrainedPart(parameters, kept), 1)
        return held.added_to(memory, without_activations=copies)
    share = -(-parameters // mesh.dp_shard)
    gradients = share if layout.num_microbatches == 1 else parameters
    memory = RankMemory(share, gradients, 0, kept, unsharded=parameters)
    return held.added_to(memory, without_activations=parameters + 2 * largest_unit)


def bytes_per_parameter_byte(states: float, layout: Layout) -> float:
    """Returns the least bytes that a rank holds for each byte of its parameters, unsharded.

    Args:
        states: Bytes of optimizer state for each byte of parameters.
        layout: The layout.
    """
    shards = layout.mesh.dp_shard
    least = (2.0 + states) / shards
    if layout.mesh.pp == 1 or shards == 1:
        return least
    return least + 1.0 + (layout.num_microbatches > 1) * (1.0 - 1.0 / shards)


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

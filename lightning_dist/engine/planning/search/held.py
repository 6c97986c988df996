"""The bytes that a rank of a mesh holds, with and without stages.

The peak is at one of three moments. In a backward there are all activations, and what one operation
needs. An update has temporary tensors. The third moment has no activations, but copies: in its
second forward DDP builds its buckets anew, in the order in which gradients came, while the old ones
hold the last gradients; and replicas of stages copy gradients into messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, sharded
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.messages import BUCKET_BYTES
from lightning_dist.engine.planning.search.model_costs import ModelCosts
from lightning_dist.engine.schedules.actions import Action, ActionKind

Flights = frozenset[tuple[tuple[int, int], ...]]
"""Numbers of micro-batches in flight on each stage of a rank, at the moments with most of them."""


def memory_of_rank(
    costs: ModelCosts,
    layout: Layout,
    layers: Sequence[LayerCosts],
    activations: float,
    backward: float,
    messages: float = 0.0,
) -> RankMemory:
    """Returns the memory of a rank.

    Without stages the layers are FSDP units. Sharded stages hold parameters whole from the first
    micro-batch to the last, and accumulated gradients too; with a single micro-batch, a unit's
    gradients are sharded at once. Of two units at a time there are copies then. So there are of two
    buckets where stages have replicas.

    Args:
        costs: Costs of the model.
        layout: The layout.
        layers: Costs of the rank's layers, before they are sharded.
        activations: Bytes of the activations of all micro-batches in flight.
        backward: Bytes that a backward needs for a moment.
        messages: Bytes of activations and gradients on their way between stages.
    """
    sizes = [layer.parameter_bytes for layer in layers]
    mesh, parameters, kept = layout.mesh, sum(sizes), round(activations)
    frozen = sum(layer.frozen_bytes for layer in layers)
    memory = RankMemory(parameters, parameters, 0, kept)
    without = 0  # beside parameters, gradients and states at a moment without activations
    if mesh.pp > 1 and mesh.dp_shard > 1:
        share = -(-parameters // mesh.dp_shard)
        gradients = share if layout.num_microbatches == 1 else parameters
        memory = RankMemory(share, gradients, 0, kept, unsharded=parameters + frozen)
        without = parameters + frozen + 2 * max(sizes)
    elif mesh.pp > 1:
        without = min(parameters, 2 * BUCKET_BYTES) if mesh.dp_replicate > 1 else 0
    elif mesh.data_size > 1 and mesh.has_whole_layers:
        without = parameters  # new buckets
    elif mesh.data_size > 1:
        units = [layer.parameter_bytes + layer.frozen_bytes for layer in layers]
        units = [size for size in units if size] or [0]
        neighbours = max(map(sum, zip(units, [*units[1:], 0], strict=True)))
        part = TrainedPart(parameters, kept)
        memory = sharded(part, mesh.dp_shard, neighbours, max(sizes))
    update = costs.update_bytes
    if costs.updates_together:
        update *= parameters / max(1, costs.parameter_bytes)
    update = min(update, 2.0 * parameters) / mesh.dp_shard
    later = memory.activations + memory.unsharded + memory.buffers
    most = max(later + round(backward), round(update), without)
    untrained = -(-frozen // mesh.dp_shard) + sum(layer.buffer_bytes for layer in layers)
    return replace(
        memory,
        parameters=memory.parameters + untrained,
        optimizer_state=round(costs.states_per_parameter * memory.parameters),
        buffers=memory.buffers + round(messages),
        temporary=most - later,
    )


def bytes_between_stages(layout: Layout, rank: int, boundary_bytes: float) -> float:
    """Returns the bytes of a rank's messages.

    For each rank beside it there are the last message to it, the last one from it, and memory for
    the next.
    """
    is_end = layout.stages_per_rank == 1 and rank in (0, layout.mesh.pp - 1)
    num_neighbours = 1 if is_end or layout.mesh.pp == 2 else 2
    return 3.0 * num_neighbours * boundary_bytes


def bytes_per_parameter_byte(states: float, layout: Layout) -> float:
    """Returns the least bytes that a rank holds for each byte of its parameters, unsharded.

    ``states`` are the bytes of optimizer state for each byte of parameters.
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

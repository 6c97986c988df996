"""What a rank of some layout sends and holds in a step, on paper: from the schedules and planners.

A collective counts as the messages of a ring: an all-gather or a reduce-scatter over ``n`` ranks is
``n - 1`` messages of a rank, an all-reduce twice as many. A logged value is 8 bytes. Not counted:
headers, and the few numbers by which ranks agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from lightning_dist.engine.planning.memory import TrainedPart, pipelined, replicated, sharded
from lightning_dist.engine.planning.traffic import MessageKind, Traffic, TrafficLedger
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Rounds
from lightning_dist.engine.schedules.stash_depth import num_copies
from tests.benchmarks.scaling.layouts import LAYERS, Layout

_VALUE_BYTES = 8
_USED_BYTES = 4  # by which replicas of stages know that one of them has used a parameter
_ROUNDS_OF_RING: Mapping[MessageKind, int] = MappingProxyType(
    {MessageKind.ALL_GATHER: 1, MessageKind.REDUCE_SCATTER: 1, MessageKind.ALL_REDUCE: 2}
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its batches.

    Attributes:
        layer_bytes: Of a layer's parameters.
        row_bytes: Of a sample, and of each layer's output for it.
        rows: Samples of a batch, and micro-batches where it is split.
    """

    layer_bytes: int
    row_bytes: int
    rows: int


def traffic_of(layout: Layout, num_ranks: int, rank: int, sizes: Sizes) -> tuple[Traffic, ...]:
    """Counts what a rank sends in a step."""
    mesh = layout.mesh(num_ranks)
    ledger = TrafficLedger()
    part = LAYERS * sizes.layer_bytes
    if layout.schedule:
        shape = layout.shape(num_ranks, sizes.rows, rank)
        part *= shape.stages_per_rank
        _add_stages(ledger, shape, sizes)
    if mesh.dp_replicate > 1:
        told = _USED_BYTES * part // sizes.layer_bytes if layout.schedule else 0
        ledger.add(MessageKind.ALL_REDUCE, ("dp_replicate",), part + told)
    if mesh.dp_shard > 1:
        for kind, times in ((MessageKind.ALL_GATHER, 2), (MessageKind.REDUCE_SCATTER, 1)):
            ledger.add(kind, ("dp_shard",), times * part, count=times * LAYERS)
    return ledger.traffic


def _add_stages(ledger: TrafficLedger, shape: PipelineShape, sizes: Sizes) -> None:
    """Adds the messages of a steady round, of a batch's results, and of the batch itself."""
    homes, rounds = shape.rank_of_stage, Rounds(shape)
    each = sizes.rows // shape.num_microbatches * sizes.row_bytes
    for action in rounds.training(rounds.lag + 1, shape.num_microbatches):
        if action.kind.is_send:
            step = 1 if action.kind is ActionKind.SEND_F else -1
            if homes[action.stage_index + step] != shape.rank:  # else it stays in memory
                ledger.add(MessageKind.SEND, ("pp",), each)
    if shape.rank == homes[-1]:
        others = shape.num_ranks - 1
        ledger.add(MessageKind.SEND, ("pp",), others * _VALUE_BYTES, count=others)
    if shape.rank + 1 < shape.num_ranks:  # a batch goes from rank to rank
        ledger.add(MessageKind.SEND, ("pp",), sizes.rows * sizes.row_bytes)


def num_messages(traffic: tuple[Traffic, ...], layout: Layout, num_ranks: int) -> int:
    """Counts messages from one rank to another."""
    sizes = layout.mesh(num_ranks).sizes

    def of(each: Traffic) -> int:
        ranks = prod(sizes[axis] for axis in each.axes)
        return each.count * _ROUNDS_OF_RING.get(each.kind, 0) * (ranks - 1) or each.count

    return sum(map(of, traffic))


def num_bytes(traffic: tuple[Traffic, ...], layout: Layout, num_ranks: int) -> int:
    """Counts the bytes of a rank's messages to others."""
    sizes = layout.mesh(num_ranks).sizes

    def of(each: Traffic) -> int:
        ranks = prod(sizes[axis] for axis in each.axes)
        rounds = _ROUNDS_OF_RING.get(each.kind)
        return each.num_bytes if rounds is None else rounds * each.num_bytes * (ranks - 1) // ranks

    return sum(map(of, traffic))


def memory_of(layout: Layout, num_ranks: int, rank: int, sizes: Sizes) -> int:
    """Counts the bytes that a rank holds at most, by the planner; SGD, and layers of one input."""
    mesh = layout.mesh(num_ranks)
    own, whole = LAYERS * sizes.layer_bytes, LAYERS * sizes.rows * sizes.row_bytes
    if not layout.schedule:
        part = TrainedPart(own, whole, states_per_parameter=0)
        if mesh.dp_shard == 1:
            return replicated(part, num_ranks).peak
        return sharded(part, num_ranks, 2 * sizes.layer_bytes, sizes.layer_bytes).peak
    shape = layout.shape(num_ranks, sizes.rows, rank)
    per_rank = shape.stages_per_rank
    stage = TrainedPart(per_rank * own, whole // shape.num_microbatches, states_per_parameter=0)
    in_flight = shape.build().in_flight(shape.rank)
    copies = max(num_copies(shape, "stash")[stage] for stage in shape.stages)
    return pipelined(stage, in_flight, 1 + copies).peak

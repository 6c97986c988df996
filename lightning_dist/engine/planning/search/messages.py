"""The messages of a step along the data axes and inside of layers, by rings."""

from __future__ import annotations

from lightning_dist.engine.planning.collectives import ALGORITHMS, Algorithm
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.search.layout import Layout, Wait
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import TensorCosts
from lightning_dist.engine.planning.traffic import MessageKind

INSIDE = "layers' results"
"""What tensor-parallel ranks wait for."""


def _ring(kind: MessageKind) -> Algorithm:
    return next(algorithm for algorithm in ALGORITHMS[kind] if algorithm.name == "ring")


_GATHER, _REDUCE = _ring(MessageKind.ALL_GATHER), _ring(MessageKind.ALL_REDUCE)
_SCATTER = _ring(MessageKind.REDUCE_SCATTER)


def along_data(
    machine: Machine, layout: Layout, num_bytes: int, num_units: int, num_gathers: int
) -> dict[str, Wait]:
    """Returns the waits of a step for gradients and parameters, none of them hidden.

    Args:
        machine: The machine.
        layout: The layout.
        num_bytes: Bytes of the parameters that shards and replicas share.
        num_units: Messages that they are sent in.
        num_gathers: Times that shards are gathered.
    """
    mesh = layout.mesh
    sent = gradients = 0.0
    waits = {}
    if mesh.dp_shard > 1:
        size, link = mesh.dp_shard, machine.link(mesh, "dp_shard")
        sent = _SCATTER.share(size) * num_bytes
        gradients = _seconds(_SCATTER, size, num_bytes, num_units, link)
        gathered = num_gathers * _GATHER.share(size) * num_bytes
        seconds = num_gathers * _seconds(_GATHER, size, num_bytes, num_units, link)
        waits["parameters"] = Wait(gathered, seconds)
    if mesh.dp_replicate > 1:
        link, share = machine.link(mesh, "dp_replicate"), num_bytes / mesh.dp_shard
        sent += _REDUCE.share(mesh.dp_replicate) * share
        gradients += _seconds(_REDUCE, mesh.dp_replicate, share, num_units, link)
    if mesh.data_size > 1:
        waits["gradients"] = Wait(sent, gradients)
    return waits


def inside_layers(machine: Machine, layout: Layout, found: TensorCosts) -> dict[str, Wait]:
    """Returns the wait of all layers of one micro-batch for tensor-parallel ranks."""
    tp, link = layout.mesh.tp, machine.link(layout.mesh, "tp")
    num_bytes = found.message_bytes * layout.microbatch_size
    seconds = _seconds(_REDUCE, tp, num_bytes, found.num_messages, link)
    return {INSIDE: Wait(_REDUCE.share(tp) * num_bytes, seconds)}


def _seconds(
    algorithm: Algorithm, num_ranks: int, num_bytes: float, num_messages: int, link: Link
) -> float:
    """Returns the seconds of some collectives of so many bytes together, one after the other."""
    if not num_messages:
        return 0.0
    return num_messages * algorithm.seconds(num_ranks, num_bytes / num_messages, link)

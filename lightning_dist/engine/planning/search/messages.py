"""The waits of a step for messages: gradients and parameters, layers' results, and batches.

Collectives are taken for rings. No wait is hidden here; the estimate (:mod:`.search.estimate`)
subtracts what a rank computes meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.collectives import ring
from lightning_dist.engine.planning.search.layout import BATCHES, Layout, Wait
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import ModelCosts
from lightning_dist.engine.planning.traffic import MessageKind

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients in a message, of DistributedDataParallel and of stages' replicas."""


def along_data(
    machine: Machine,
    layout: Layout,
    num_bytes: int,
    num_units: int,
    num_gathers: int,
    frozen_bytes: int = 0,
) -> dict[str, Wait]:
    """Returns the waits of a step for gradients and parameters, none of them hidden.

    Args:
        machine: The machine.
        layout: The layout.
        num_bytes: Bytes of the parameters that shards and replicas share.
        num_units: Messages that they are sent in.
        num_gathers: Times that shards are gathered.
        frozen_bytes: Bytes of further parameters, which are gathered only.
    """
    mesh = layout.mesh
    if mesh.data_size == 1:
        return {}
    if mesh.has_whole_layers:
        count = 1 + num_bytes // BUCKET_BYTES
        return {
            "gradients": _rings(
                machine, mesh, "dp_replicate", MessageKind.ALL_REDUCE, num_bytes, count
            )
        }
    both = {
        MessageKind.ALL_GATHER: num_bytes + frozen_bytes,
        MessageKind.REDUCE_SCATTER: num_bytes,
    }
    if mesh.dp_shard > 1:
        found = [_rings(machine, mesh, "dp_shard", *pair, num_units) for pair in both.items()]
    else:
        each = [machine.alone.of(kind).seconds(size / num_units) for kind, size in both.items()]
        found = [Wait(0.0, num_units * seconds) for seconds in each]
    gathers, scatters = found
    share = num_bytes / mesh.dp_shard
    sums = _rings(machine, mesh, "dp_replicate", MessageKind.ALL_REDUCE, share, num_units)
    return {
        "parameters": Wait(num_gathers * gathers.num_bytes, num_gathers * gathers.seconds),
        "gradients": Wait(scatters.num_bytes + sums.num_bytes, scatters.seconds + sums.seconds),
    }


def inside_layers(machine: Machine, layout: Layout, costs: ModelCosts) -> Wait:
    """Returns the wait of all layers of one micro-batch for tensor-parallel ranks."""
    if layout.mesh.tp == 1:
        return Wait(0.0, 0.0)
    found = costs.tensor[layout.mesh.tp]
    units = (found.message_bytes * layout.microbatch_size, found.num_messages)
    sent = _rings(machine, layout.mesh, "tp", MessageKind.ALL_REDUCE, *units)
    return replace(sent, seconds=sent.seconds + found.num_layers * machine.tensor_seconds)


def batch_to_ranks(machine: Machine, layout: Layout, sample_bytes: float) -> dict[str, Wait]:
    """Returns the wait for a batch that one rank of a replica reads.

    It goes from each of the replica's ranks to the next.
    """
    mesh = layout.mesh
    num_hops = mesh.pp * mesh.tp - 1
    if not num_hops or not sample_bytes:
        return {}
    num_bytes = layout.batch_size * sample_bytes
    link = machine.link(mesh, "pp" if mesh.pp > 1 else "tp", MessageKind.SEND)
    return {BATCHES: Wait(num_bytes, num_hops * link.seconds(num_bytes))}


def _rings(
    machine: Machine,
    mesh: MeshShape,
    axis: str,
    kind: MessageKind,
    num_bytes: float,
    num_messages: int,
) -> Wait:
    """Returns the cost of some collectives of so many bytes together, one after the other."""
    size = mesh.sizes[axis]
    if size == 1 or not num_messages:
        return Wait(0.0, 0.0)
    link = machine.link(mesh, axis, kind)
    seconds = num_messages * ring(kind).seconds(size, num_bytes / num_messages, link)
    return Wait(ring(kind).share(size) * num_bytes, seconds)

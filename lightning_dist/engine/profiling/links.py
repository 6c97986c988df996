"""Measurement of the links along each axis of a mesh.

Each rank sends to the next one of its group and receives from the one before, as in the rings of
collectives, in all groups of an axis at once. So a network card that several groups share counts
with what is left for each.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.planning.links import LinkFit, fit_link

_FIRST_BYTES, _LAST_BYTES, _FACTOR = 1 << 10, 1 << 26, 4
_NUM_ROUNDS = 3
_SECONDS_PER_ROUND = 0.1
_MOST_MESSAGES = 50


def measure_links(mesh: DeviceMesh, last_bytes: int = _LAST_BYTES) -> dict[str, LinkFit]:
    """Fits latency and bandwidth of each axis. Collective: every rank of the world must call it.

    It sends messages of 1 KiB to 64 MiB, which takes some seconds, and longer over slow links.

    Args:
        mesh: Mesh of all ranks, with names.
        last_bytes: Bytes of the largest message, at least 4 KiB.

    Returns:
        By name, each axis that has several ranks; the seconds are those of the slowest rank, so
        that all ranks return the same. For planning, use
        :data:`lightning_dist.engine.planning.collectives.ALGORITHMS`.

    Raises:
        ValueError: The mesh has no names.
    """
    if mesh.mesh_dim_names is None:
        raise ValueError("The mesh has no names. Create it with init_device_mesh(mesh_dim_names=…)")
    sizes = [_FIRST_BYTES]
    while sizes[-1] < last_bytes:
        sizes.append(sizes[-1] * _FACTOR)
    device = torch.device(mesh.device_type)
    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    return {
        name: fit_link(sizes, [_seconds(size, group, device) for size in sizes])
        for name, group in groups.items()
        if dist.get_world_size(group) > 1
    }


def _seconds(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the seconds of one of several messages in a row, on the rank that took longest."""
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, ranks[(place + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[place - 1], group),
    ]

    def messages(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        finish(device)
        return (time.perf_counter() - start) / count

    first = _longest(messages(1), device)  # it may also form connections
    count = min(max(int(_SECONDS_PER_ROUND / first), 1), _MOST_MESSAGES)
    return _longest(median(messages(count) for _ in range(_NUM_ROUNDS)), device)


def _longest(seconds: float, device: torch.device) -> float:
    """Returns the seconds of the slowest rank of the world, and lets all go on together."""
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()

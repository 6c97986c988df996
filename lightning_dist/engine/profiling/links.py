"""Measurement of the links along each axis of a mesh.

Each rank sends to the next one of its group and receives from the one before, as in the rings of
collectives, in all groups of an axis at once. So a network card that several groups share counts
with what is left for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.planning.collectives import Algorithm, ring
from lightning_dist.engine.planning.links import Link, LinkFit, fit_link
from lightning_dist.engine.planning.traffic import MessageKind

_FIRST_BYTES, _LAST_BYTES, _FACTOR = 1 << 10, 1 << 26, 4
FEW_SIZES = (1 << 12, 1 << 18, 1 << 22)
"""Bytes of tensors, from what only has a latency to what only has a bandwidth."""
SHORT = 0.03
"""Seconds of a round, where many things are measured."""
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


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Fits the link over which a ring would take as long as the backend's all-reduce.

    Collective: every rank of the world must call it, each with its group of the same axis. All
    ranks return the same.
    """
    size, algorithm = dist.get_world_size(group), ring(MessageKind.ALL_REDUCE)
    seconds = []
    for num_bytes in FEW_SIZES:
        value = torch.zeros(num_bytes // 4, device=device)
        seconds.append(
            time_on_slowest_rank(partial(dist.all_reduce, value, group=group), device, SHORT)
        )
    return fit_ring(algorithm, size, seconds)


def fit_ring(algorithm: Algorithm, num_ranks: int, seconds: Sequence[float]) -> Link:
    """Fits the link over which a ring takes some seconds, for each of :data:`FEW_SIZES`."""
    rounds, share = algorithm.rounds(num_ranks), algorithm.share(num_ranks)
    sizes = [int(share * num_bytes / rounds) for num_bytes in FEW_SIZES]
    return fit_link(sizes, [each / rounds for each in seconds]).link


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

    def send() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return time_on_slowest_rank(send, device)


def time_on_slowest_rank(
    run: Callable[[], object], device: torch.device, per_round: float = _SECONDS_PER_ROUND
) -> float:
    """Times a function on the slowest rank. Collective: every rank of the world must call it.

    Returns the seconds of one of several runs in a row, on the rank that took longest; each of
    three rounds may take ``per_round`` seconds.
    """

    def runs(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        finish(device)
        return (time.perf_counter() - start) / count

    runs(1)  # it may also form connections
    first = _longest(runs(1), device)
    count = min(max(int(per_round / first), 1), _MOST_MESSAGES)
    return _longest(median(runs(count) for _ in range(_NUM_ROUNDS)), device)


def _longest(seconds: float, device: torch.device) -> float:
    """Returns the seconds of the slowest rank of the world, and lets all go on together."""
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()

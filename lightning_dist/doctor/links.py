"""Links: latency and bandwidth of each pair of ranks and along each axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run
from lightning_dist.doctor.devices import device_of
from lightning_dist.doctor.result import Result, fail, ok, warn
from lightning_dist.engine.common.mesh_shape import AXES
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.common.table import Table
from lightning_dist.engine.comms.store_notes import finish

_NUM_PINGS, _NUM_REDUCTIONS = 20, 5
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 26
_ENOUGH_SECONDS = 0.05  # for a transfer, so that its latency does not count
_MOST_ALONE = 12  # ranks whose pairs take turns; of more, each host's first, hosts at once
_AXIS_ELEMENTS = 1 << 20
_SLOW_BYTES_PER_SECOND = 125e6 * 0.8  # 1 Gbit/s, of which gloo gets most
_SLOW_SECONDS = 1e-3
_ODD_FACTOR = 3.0  # a link that is so much slower than the median of its kind is odd
_ROWS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of ranks."""

    ranks: tuple[int, int]  # the pair
    latency_seconds: float  # from one to the other
    bytes_per_second: float  # from one to the other, in one direction at a time

    @property
    def is_poor(self) -> bool:
        """Whether it is worse than a link of 1 Gbit/s within a building."""
        is_slow = self.bytes_per_second < _SLOW_BYTES_PER_SECOND
        return is_slow or self.latency_seconds > _SLOW_SECONDS


def rounds_of_pairs(hosts: Mapping[int, str]) -> list[list[tuple[int, int]]]:
    """Lists the pairs to measure; those of a round are measured at the same time.

    Args:
        hosts: The host of each rank.
    """
    if len(hosts) <= _MOST_ALONE:
        return [[pair] for pair in combinations(sorted(hosts), 2)]
    firsts = list({host: rank for rank, host in sorted(hosts.items(), reverse=True)}.values())
    if len(firsts) == 1:  # the ranks of one host share its memory: neighbours are enough
        return [[pair] for pair in zip(sorted(hosts), sorted(hosts)[1:], strict=False)]
    # The method of a round-robin tournament: the first stays, the others move on by one.
    ring: list[int] = sorted(firsts) + [-1] * (len(firsts) % 2)
    rounds = []
    for _ in ring[1:]:
        pairs = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _probe_pairs(run: Run) -> list[Link]:
    """Measures the pairs of this rank; those with this rank first are returned."""
    own, links = run.launch.rank, []
    for pairs in rounds_of_pairs(run.hosts):
        dist.barrier()
        for pair in pairs:
            if own in pair:
                link = _measure(pair, own, device_of(run))
                links += [link] if own == pair[0] else []
    return links


def _measure(pair: tuple[int, int], own: int, device: torch.device) -> Link:
    is_first = own == pair[0]
    peer = pair[1] if is_first else pair[0]
    pings = [_ping(torch.zeros(1, device=device), peer, is_first) for _ in range(_NUM_PINGS)]
    size, seconds = _FIRST_BYTES, 0.0
    while seconds < _ENOUGH_SECONDS and size < _LAST_BYTES:
        size *= 2
        ping = _ping(torch.zeros(size // 4, device=device), peer, is_first)
        time_of_first = torch.tensor([ping / 2], device=device)
        if is_first:
            dist.send(time_of_first, peer)
        else:
            dist.recv(time_of_first, peer)
        seconds = time_of_first.item()
    return Link(pair, median(pings) / 2, size / seconds)


def _ping(tensor: torch.Tensor, peer: int, is_first: bool) -> float:
    """Sends a tensor there and back; returns the seconds of both ways."""
    start = time.perf_counter()
    if is_first:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    else:
        dist.recv(tensor, peer)
        dist.send(tensor, peer)
    finish(tensor.device)
    return time.perf_counter() - start


def judge_pairs(run: Run, facts: Mapping[int, Sequence[Link]]) -> Result:
    """Judges the links of all pairs, and names the slowest."""
    links = sorted(
        (link for own in facts.values() for link in own), key=lambda link: link.bytes_per_second
    )
    if not links:
        return ok("a single rank")
    table = _table_of(run, links[:_ROWS_SHOWN])
    between = [link for link in links if _crosses(run, link)]
    within = [link for link in links if link not in between]
    for kind in (between, within):
        usual = median(link.bytes_per_second for link in kind) if kind else 0.0
        if kind and usual > _ODD_FACTOR * kind[0].bytes_per_second:
            return warn(
                f"{_describe(run, kind[0])}; the median of such links has {usual / 1e6:.0f} MB/s",
                "Look at that host: another interface (GLOO_SOCKET_IFNAME), a slow port, another"
                " job.",
                table,
            )
    poor = [link for link in between if link.is_poor]
    if poor:
        return warn(
            f"{_describe(run, poor[0])}: less than a link of 1 Gbit/s has",
            "Is it the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? If it is, use what"
            " sends least between hosts: stages, compression, sync_every; see docs/choosing.md.",
            table,
        )
    return ok(f"slowest: {_describe(run, links[0])}", table)


def _crosses(run: Run, link: Link) -> bool:
    return run.hosts[link.ranks[0]] != run.hosts[link.ranks[1]]


def _describe(run: Run, link: Link) -> str:
    figures = f"{link.bytes_per_second / 1e6:.0f} MB/s, {link.latency_seconds * 1e6:.0f} us"
    return f"{run.places(list(link.ranks))}, {figures}"


def _table_of(run: Run, links: Sequence[Link]) -> Table:
    rows = [
        (
            *(f"{rank} ({run.hosts[rank]})" for rank in link.ranks),
            f"{link.latency_seconds * 1e6:.0f}",
            f"{link.bytes_per_second / 1e6:.0f}",
        )
        for link in links
    ]
    headings = ("rank", "rank", "latency (us)", "bandwidth (MB/s)")
    return Table("Links, the slowest first", headings, tuple(rows), frozenset({2, 3}))


@dataclass(frozen=True, slots=True)
class Axis:
    """An all-reduce along an axis of a mesh."""

    name: str  # name of the strategy and the axis
    ranks: tuple[int, ...]  # the group
    seconds: float  # time of an all-reduce of 4 MiB
    num_wrong: int  # elements of its result that were wrong

    @property
    def bytes_per_second(self) -> float:
        """What each link carries: a ring sends each element almost twice."""
        share = 2 * (len(self.ranks) - 1) / len(self.ranks)
        return share * 4 * _AXIS_ELEMENTS / self.seconds


def axes_of(run: Run) -> dict[tuple[tuple[int, ...], ...], str]:
    """Returns the name of each distinct partition of the ranks along an axis of a mesh."""
    axes: dict[tuple[tuple[int, ...], ...], str] = {}
    for name, mesh in run.meshes.items():
        for axis in AXES:
            if mesh.sizes[axis] > 1:
                groups = tuple(tuple(ranks) for ranks in mesh.groups(axis))
                axes.setdefault(groups, f"{axis} of {name}")
    return axes


def _probe_axes(run: Run) -> list[Axis]:
    """Measures an all-reduce in each group; the first rank of each returns it."""
    own, device, axes = run.launch.rank, device_of(run), []
    numbers = torch.arange(_AXIS_ELEMENTS, device=device) % 251
    for groups, name in axes_of(run).items():
        formed = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        [ranks] = [ranks for ranks in groups if own in ranks]
        right = (len(ranks) * numbers + sum(ranks)).float()
        times, num_wrong = [], 0
        for _ in range(_NUM_REDUCTIONS):
            value = (numbers + own).float()
            dist.barrier(formed[ranks])
            start = time.perf_counter()
            dist.all_reduce(value, group=formed[ranks])
            finish(device)
            times.append(time.perf_counter() - start)
            num_wrong += int((value != right).sum())
        axes += [Axis(name, ranks, median(times), num_wrong)]
    return axes


def judge_axes(run: Run, facts: Mapping[int, Sequence[Axis]]) -> Result:
    """Judges the all-reduces along all axes, and names the slowest."""
    wrong = [(rank, axis) for rank, axes in facts.items() for axis in axes if axis.num_wrong]
    if wrong:
        [rank, axis], *_ = wrong
        return fail(
            f"an all-reduce along {axis.name} is wrong on {run.places([rank])}, in"
            f" {axis.num_wrong} elements",
            "Do not train there. Look at that host's memory, GPU and network card; with NCCL try"
            " NCCL_P2P_DISABLE=1.",
        )
    axes = sorted(
        (axis for rank, own in facts.items() for axis in own if rank == axis.ranks[0]),
        key=lambda axis: axis.bytes_per_second,
    )
    if not axes:
        return ok("no axis has several ranks")
    slowest = axes[0]
    rows = tuple(
        (
            axis.name,
            shorten([str(rank) for rank in axis.ranks]),
            f"{axis.seconds * 1e3:.1f}",
            f"{axis.bytes_per_second / 1e6:.0f}",
        )
        for axis in axes[:_ROWS_SHOWN]
    )
    headings = ("axis", "ranks", "all-reduce of 4 MiB (ms)", "bandwidth (MB/s)")
    return ok(
        f"all-reduces are right; slowest: {slowest.name},"
        f" {slowest.bytes_per_second / 1e6:.0f} MB/s",
        Table("Axes, the slowest first", headings, rows, frozenset({2, 3})),
    )


LINKS: tuple[Check[Any], ...] = (
    Check("links", _probe_pairs, judge_pairs, "The group has formed, but a pair hangs.", 120.0),
    Check("all-reduce", _probe_axes, judge_axes, "The group has formed, but one hangs.", 120.0),
)

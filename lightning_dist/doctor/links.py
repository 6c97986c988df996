"""Links: latency and bandwidth of each pair of ranks and along each axis of a mesh."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.doctor.check import Check, Run
from lightning_dist.doctor.hosts import device_of
from lightning_dist.doctor.report import Result, fail, ok, warn
from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.common.mesh_shape import AXES
from lightning_dist.engine.common.table import Table

_NUM_PINGS, _NUM_REDUCTIONS = 20, 5
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 26
_ENOUGH_SECONDS = 0.05  # for a transfer, so that its latency does not count
_MOST_ALONE = 12  # ranks whose pairs take turns; of more, each host's first, hosts at once
_AXIS_ELEMENTS = 1 << 20
# A link of 1 Gbit/s within a building, of which gloo gets most.
_SLOW_BYTES_PER_SECOND, _SLOW_SECONDS = 125e6 * 0.8, 1e-3
_ODD_FACTOR = 3.0  # a link that is so much slower than the median of its kind is odd
_ROWS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of ranks, or the ranks of a group along an axis of a mesh."""

    name: str  # what was measured
    ranks: tuple[int, ...]  # the pair, or the group
    seconds: float  # latency from one to the other, or time of an all-reduce
    bytes_per_second: float  # what it carries in one direction at a time
    num_wrong: int = 0  # elements of the all-reduce's result that were wrong


def rounds_of_pairs(hosts: Mapping[int, str]) -> list[list[tuple[int, int]]]:
    """Lists the pairs to measure; those of a round are measured at the same time."""
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
                link = _measure(pair, own == pair[0], device_of(run))
                links += [link] if own == pair[0] else []
    return links


def _measure(pair: tuple[int, int], is_first: bool, device: torch.device) -> Link:
    peer = pair[is_first]
    steps = (dist.send, dist.recv) if is_first else (dist.recv, dist.send)

    def ping(num_elements: int) -> float:
        """Sends a tensor there and back; returns the seconds of one way."""
        tensor = torch.zeros(num_elements, device=device)
        start = time.perf_counter()
        for step in steps:
            step(tensor, peer)
        finish(device)
        return (time.perf_counter() - start) / 2

    latency = median(ping(1) for _ in range(_NUM_PINGS))
    size, seconds = _FIRST_BYTES, 0.0
    while seconds < _ENOUGH_SECONDS and size < _LAST_BYTES:
        size *= 2
        time_of_first = torch.tensor([ping(size // 4)], device=device)
        steps[0](time_of_first, peer)  # so that both go on, or both end
        seconds = time_of_first.item()
    return Link("pair", pair, latency, size / seconds)


def judge_pairs(run: Run, facts: Mapping[int, Sequence[Link]]) -> Result:
    """Judges the links of all pairs, and names the slowest."""
    links = _sorted(link for own in facts.values() for link in own)
    if not links:
        return ok("a single rank")
    table = _table_of(run, "Links, the slowest first", links)
    between = [link for link in links if len({run.hosts[rank] for rank in link.ranks}) > 1]
    within = [link for link in links if link not in between]
    for kind in filter(None, (between, within)):
        usual = median(link.bytes_per_second for link in kind)
        if usual > _ODD_FACTOR * kind[0].bytes_per_second:
            return warn(
                f"{_describe(run, kind[0])}; the median of such links has {usual / 1e6:.0f} MB/s",
                "Look at that host: another interface (GLOO_SOCKET_IFNAME), a slow port, another"
                " job.",
                table,
            )
    for link in between:
        if link.bytes_per_second < _SLOW_BYTES_PER_SECOND or link.seconds > _SLOW_SECONDS:
            return warn(
                f"{_describe(run, link)}: less than a link of 1 Gbit/s has",
                "Is it the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? If it is, use"
                " what sends least between hosts: stages, compression, sync_every; see"
                " docs/choosing.md.",
                table,
            )
    return ok(f"slowest: {_describe(run, links[0])}", table)


def axes_of(run: Run) -> dict[tuple[tuple[int, ...], ...], str]:
    """Returns the name of each distinct partition of the ranks along an axis of a mesh."""
    axes: dict[tuple[tuple[int, ...], ...], str] = {}
    for name, mesh in run.meshes.items():
        for axis in AXES:
            if mesh.sizes[axis] > 1:
                groups = tuple(tuple(ranks) for ranks in mesh.groups(axis))
                axes.setdefault(groups, f"{axis} of {name}")
    return axes


def _probe_axes(run: Run) -> list[Link]:
    """Measures an all-reduce in each group; the first rank of each returns it."""
    own, device, axes = run.launch.rank, device_of(run), []
    numbers = torch.arange(_AXIS_ELEMENTS, device=device) % 251
    for groups, name in axes_of(run).items():
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
        [ranks] = [ranks for ranks in groups if own in ranks]
        right = (len(ranks) * numbers + sum(ranks)).float()
        times, num_wrong = [], 0
        for _ in range(_NUM_REDUCTIONS):
            value = (numbers + own).float()
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(value, group=group)
            finish(device)
            times.append(time.perf_counter() - start)
            num_wrong += int((value != right).sum())
        # A ring sends each element almost twice.
        num_bytes = 4 * _AXIS_ELEMENTS * 2 * (len(ranks) - 1) / len(ranks)
        axes += [Link(name, ranks, median(times), num_bytes / median(times), num_wrong)]
    return axes


def judge_axes(run: Run, facts: Mapping[int, Sequence[Link]]) -> Result:
    """Judges the all-reduces along all axes, and names the slowest."""
    for rank, links in facts.items():
        for link in links:
            if link.num_wrong:
                return fail(
                    f"an all-reduce along {link.name} is wrong on {run.places([rank])}, in"
                    f" {link.num_wrong} elements",
                    "Do not train there. Look at that host's memory, GPU and network card; with"
                    " NCCL try NCCL_P2P_DISABLE=1.",
                )
    links = _sorted(link for rank, own in facts.items() for link in own if rank == link.ranks[0])
    if not links:
        return ok("no axis has several ranks")
    table = _table_of(run, "All-reduces of 4 MiB, the slowest first", links)
    return ok(f"all-reduces are right; slowest: {_describe(run, links[0])}", table)


def _sorted(links: Iterable[Link]) -> list[Link]:
    return sorted(links, key=lambda link: link.bytes_per_second)


def _figures(link: Link) -> tuple[str, str]:
    return f"{link.seconds * 1e6:.0f}", f"{link.bytes_per_second / 1e6:.0f}"


def _describe(run: Run, link: Link) -> str:
    seconds, rate = _figures(link)
    return f"{link.name} {run.places(link.ranks)}, {rate} MB/s, {seconds} us"


def _table_of(run: Run, title: str, links: Sequence[Link]) -> Table:
    rows = [(link.name, run.places(link.ranks), *_figures(link)) for link in links[:_ROWS_SHOWN]]
    headings = ("link", "ranks", "time (us)", "bandwidth (MB/s)")
    return Table(title, headings, tuple(rows), frozenset({2, 3}))


LINKS: tuple[Check[Any], ...] = (
    Check("links", _probe_pairs, judge_pairs, "The group has formed, but a pair hangs.", 120.0),
    Check("all-reduce", _probe_axes, judge_axes, "The group has formed, but one hangs.", 120.0),
)

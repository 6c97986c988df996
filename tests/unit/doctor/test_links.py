from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from lightning_dist.doctor.links import (
    Link,
    axes_of,
    judge_axes,
    judge_pairs,
    rounds_of_pairs,
)
from lightning_dist.doctor.report import Result, Status
from tests.unit.doctor.facts import TWO_HOSTS, with_mesh

GOOD = {pair: Link("pair", pair, 50e-6, 1e9) for pair in combinations(range(4), 2)}


def judged(*others: Link) -> Result:
    links = GOOD | {link.ranks: link for link in others}
    return judge_pairs(TWO_HOSTS, {0: list(links.values())})


def test_the_slowest_link_is_named_and_stands_first() -> None:
    result = judged(Link("pair", (1, 2), 60e-6, 0.5e9))
    assert result.status is Status.OK
    assert result.found == "slowest: pair a (rank 1), b (rank 2), 500 MB/s, 60 us"
    assert result.table is not None
    assert result.table.rows[0] == ("pair", "a (rank 1), b (rank 2)", "60", "500")
    assert judge_pairs(TWO_HOSTS, {0: []}).status is Status.OK


def test_a_throttled_link_is_a_warning() -> None:
    # All links between hosts are slow: a network of 100 Mbit/s.
    slow = [Link("pair", pair, 200e-6, 12e6) for pair in GOOD if pair[0] < 2 <= pair[1]]
    result = judged(*slow)
    assert result.status is Status.WARN
    assert "less than a link of 1 Gbit/s" in result.found
    far = [replace(link, seconds=5e-3, bytes_per_second=1e9) for link in slow]
    assert judged(*far).status is Status.WARN
    # Between two processes of a host that is the machine's own business.
    assert (
        judged(Link("pair", (0, 1), 5e-3, 90e6), Link("pair", (2, 3), 5e-3, 90e6)).status
        is Status.OK
    )


def test_a_link_that_is_slower_than_its_like_is_a_warning() -> None:
    result = judged(Link("pair", (1, 3), 50e-6, 0.2e9))
    assert result.status is Status.WARN
    assert "the median of such links has 1000 MB/s" in result.found


@pytest.mark.parametrize("num_hosts", [7, 20])
def test_each_pair_of_hosts_is_measured_once_and_no_rank_twice_at_a_time(num_hosts: int) -> None:
    hosts = {rank: f"h{rank // 2}" for rank in range(2 * num_hosts)}
    rounds = rounds_of_pairs(hosts)
    pairs = [pair for own in rounds for pair in own]
    assert len(set(pairs)) == len(pairs) == num_hosts * (num_hosts - 1) // 2
    for own in rounds:
        ranks = [rank for pair in own for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert len(rounds) <= num_hosts


def test_few_ranks_are_measured_pair_by_pair_and_many_of_a_host_with_their_neighbours() -> None:
    assert rounds_of_pairs(TWO_HOSTS.hosts) == [[pair] for pair in combinations(range(4), 2)]
    assert len(rounds_of_pairs(dict.fromkeys(range(16), "a"))) == 15


def test_a_wrong_sum_is_a_failure() -> None:
    right = Link("tp of mesh", (0, 1), 0.01, 420e6)
    assert judge_axes(TWO_HOSTS, {0: [right], 1: [right]}).status is Status.OK
    result = judge_axes(TWO_HOSTS, {0: [right], 1: [replace(right, num_wrong=3)]})
    assert result.status is Status.FAIL
    assert "along tp of mesh is wrong on a (rank 1), in 3 elements" in result.found


def test_the_slowest_axis_is_named() -> None:
    fast, slow = Link("tp of mesh", (0, 1), 0.01, 420e6), Link("pp of mesh", (0, 2), 0.1, 42e6)
    result = judge_axes(TWO_HOSTS, {0: [fast, slow], 2: [slow]})
    assert "slowest: pp of mesh a (rank 0), b (rank 2), 42 MB/s" in result.found
    assert result.table is not None
    assert [row[:2] for row in result.table.rows] == [
        ("pp of mesh", "a (rank 0), b (rank 2)"),
        ("tp of mesh", "a (ranks 0, 1)"),
    ]


def test_axes_of_several_strategies_are_measured_once() -> None:
    run = with_mesh(TWO_HOSTS, pp=2, tp=2)
    run = replace(run, meshes={**run.meshes, "other": run.meshes["mesh"]})
    assert list(axes_of(run).values()) == ["pp of mesh", "tp of mesh"]

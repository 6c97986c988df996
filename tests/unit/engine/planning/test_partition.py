from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dist.engine.planning.partition import (
    MemoryLimit,
    even_out_ranks,
    partition_layers,
    stage_of_layers,
    uniform_partition,
)


def bottleneck(costs: list[int], counts: list[int], links: list[float] | None = None) -> float:
    ends = list(itertools.accumulate(counts))
    starts = [0, *ends[:-1]]
    stages = [float(sum(costs[a:b])) for a, b in zip(starts, ends, strict=True)]
    crossed = [2 * links[end - 1] for end in ends[:-1]] if links else []
    return max([*stages, *crossed])


def brute_force(costs: list[int], num_stages: int, links: list[float] | None = None) -> float:
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    return min(
        bottleneck(costs, [b - a for a, b in itertools.pairwise([0, *cut, len(costs)])], links)
        for cut in cuts
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
@settings(max_examples=150)
def test_is_optimal(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    counts = partition_layers(costs, num_stages)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert len(counts) == num_stages
    assert bottleneck(costs, counts) == brute_force(costs, num_stages)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7), st.data())
@settings(max_examples=100)
def test_is_optimal_with_boundaries(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    costs, sizes = [list(column) for column in zip(*pairs, strict=True)]
    num_stages = data.draw(st.integers(1, len(costs)))
    counts = partition_layers(
        costs, num_stages, boundary_bytes=sizes, bandwidth_bytes_per_second=1.0
    )
    links = [float(size) for size in sizes]
    assert bottleneck(costs, counts, links) == brute_force(costs, num_stages, links)


def fits(limit: MemoryLimit, counts: list[int]) -> bool:
    ends = list(itertools.accumulate(counts))
    for stage, (end, count) in enumerate(zip(ends, counts, strict=True)):
        own = slice(end - count, end)
        needed = sum(limit.resident_bytes[own])
        needed += limit.in_flight[stage] * sum(limit.flight_bytes[own])
        needed += limit.num_copies[stage] * sum(limit.copy_bytes[own])
        if needed > limit.cap_bytes:
            return False
    return True


layer = st.tuples(*[st.integers(0, 9)] * 5)


@given(st.lists(layer, min_size=1, max_size=7), st.integers(0, 60), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_is_optimal_within_a_memory(
    layers: list[tuple[int, ...]], cap: int, stashes: bool, data: st.DataObject
) -> None:
    costs, sizes, resident, flight, copied = [list(column) for column in zip(*layers, strict=True)]
    num_stages = data.draw(st.integers(1, len(costs)))
    in_flight = [num_stages - stage if stashes else 3 for stage in range(num_stages)]
    num_copies = data.draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    limit = MemoryLimit(cap, resident, flight, in_flight, copied, num_copies)
    links = [float(size) for size in sizes]
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    cut_counts = ([b - a for a, b in itertools.pairwise([0, *c, len(costs)])] for c in cuts)
    allowed = [bottleneck(costs, counts, links) for counts in cut_counts if fits(limit, counts)]

    def partition() -> list[int]:
        return partition_layers(
            costs, num_stages, boundary_bytes=sizes, bandwidth_bytes_per_second=1.0, memory=limit
        )

    if not allowed:
        with pytest.raises(ValueError, match=f"within {cap} bytes"):
            partition()
        return
    counts = partition()
    assert fits(limit, counts)
    assert bottleneck(costs, counts, links) == min(allowed)


@pytest.mark.parametrize(
    ("costs", "num_stages", "best"), [([1, 7, 2, 2, 3], 4, 7), ([5, 4, 9, 4, 2], 3, 9)]
)
def test_where_greedy_rules_fail(costs: list[int], num_stages: int, best: int) -> None:
    assert bottleneck(costs, partition_layers(costs, num_stages)) == best


def test_a_thousand_layers_on_sixty_four_stages_are_quick() -> None:
    costs = [(index * 37) % 101 for index in range(1000)]
    sizes = [(index * 53) % 97 for index in range(1000)]
    limit = MemoryLimit(20_000, sizes, costs, range(64, 0, -1), sizes, 64 * [1])
    counts = partition_layers(
        costs, 64, boundary_bytes=sizes, bandwidth_bytes_per_second=1.0, memory=limit
    )
    assert fits(limit, counts)
    assert bottleneck(costs, partition_layers(costs, 64)) <= 2 * sum(costs) / 64


def test_uniform() -> None:
    assert uniform_partition(8, 3) == [3, 3, 2]
    with pytest.raises(ValueError, match="num_stages=4.*3"):
        uniform_partition(3, 4)


def test_bad_costs() -> None:
    with pytest.raises(ValueError, match="1, 2, 2 layers on 2 and 2 stages.*2 layers and 2 stages"):
        partition_layers([1.0, 1.0], 2, memory=MemoryLimit(9, [1], [1, 1], [2, 1], [1, 1], [1, 0]))
    with pytest.raises(ValueError, match="negative"):
        partition_layers([1.0, -1.0], 2)
    with pytest.raises(ValueError, match="together"):
        partition_layers([1.0, 1.0], 2, boundary_bytes=[1, 1])
    with pytest.raises(ValueError, match="1 entries for 2 layers"):
        partition_layers([1.0, 1.0], 2, boundary_bytes=[1], bandwidth_bytes_per_second=1.0)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_what_is_no_number_of_seconds_or_bytes(bad: float) -> None:
    with pytest.raises(ValueError, match=f"costs must be finite.*{bad}"):
        partition_layers([1.0, bad], 2)
    with pytest.raises(ValueError, match=f"boundary_bytes must be finite.*{bad}"):
        partition_layers([1.0, 1.0], 2, boundary_bytes=[bad, 1], bandwidth_bytes_per_second=1.0)


@pytest.mark.parametrize("bad", [-1.0, 0.0, float("nan")])
def test_bandwidths_that_are_none(bad: float) -> None:
    with pytest.raises(ValueError, match=f"bandwidth_bytes_per_second={bad} must be positive"):
        partition_layers([1.0, 1.0], 2, boundary_bytes=[1, 1], bandwidth_bytes_per_second=bad)


@pytest.mark.parametrize("homes", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)])
def test_ranks_with_several_stages_are_evened_out(homes: tuple[int, ...]) -> None:
    costs = [1.0] * 4 + [8.0] + [1.0] * 7
    first = partition_layers(costs, len(homes))
    found = even_out_ranks(costs, first, homes)
    assert (sum(found), min(found)) == (12, 1)

    def busiest(cut: list[int]) -> float:
        busy = [0.0] * (1 + max(homes))
        for cost, stage in zip(costs, stage_of_layers(cut), strict=True):
            busy[homes[stage]] += cost
        return max(busy)

    assert busiest(found) <= busiest(first)
    if homes == (0, 1, 1, 0):
        assert (busiest(first), busiest(found)) == (14.0, 10.0)
    assert even_out_ranks(costs, found, homes) == found
    assert even_out_ranks([1.0] * 2, [1, 1], (0, 1)) == [1, 1]


def test_a_partition_fits_if_each_stage_does() -> None:
    limit = MemoryLimit(10.0, [1.0, 2.0, 3.0], [1.0] * 3, [2, 1], [0.5] * 3, [2, 0])
    assert limit.fits((2, 1))  # 3 + 2 x 2 + 2 x 1, and 3 + 1
    assert limit.fits((1, 2))  # 1 + 2 x 1 + 2 x 0.5, and 5 + 2
    assert not replace(limit, cap_bytes=8.0).fits((2, 1))
    assert not replace(limit, cap_bytes=6.0).fits((1, 2))

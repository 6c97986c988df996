"""Constants and counts that are given as sizes of micro-batches weigh as on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lightning_dist.strategies.pipelining.results.step_log import GivenSize


def cut(num_samples: int, most: int) -> list[int]:
    count = min(num_samples, most)
    return [num_samples // count + (i < num_samples % count) for i in range(count)]


def weights_of(batches: Sequence[int], most: int, given: Callable[[int], float]) -> list[float]:
    size = GivenSize()
    pieces = [cut(num_samples, most) for num_samples in batches]
    totals = [size.weights_of(rows, [given(n) for n in rows])[1] for rows in pieces]
    return [total / totals[0] for total in totals]


@pytest.mark.parametrize("batches", [(16, 16, 3), (16, 16, 9), (16, 2, 5), (3, 16, 16), (9, 16, 1)])
@pytest.mark.parametrize("constant", [1, 16, 5])
def test_constants_are_the_same_for_each_batch(batches: Sequence[int], constant: int) -> None:
    assert weights_of(batches, 8, lambda _: constant) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("batches", [(16, 16, 3), (8, 8, 3), (3, 8, 2), (1, 8, 4), (9, 16, 1)])
@pytest.mark.parametrize("per_sample", [1, 5, 0.5])
def test_counts_are_summed(batches: Sequence[int], per_sample: float) -> None:
    expected = [number / batches[0] for number in batches]
    assert weights_of(batches, 8, lambda rows: per_sample * rows) == pytest.approx(expected)


def test_a_batch_size_is_told_from_a_count_where_pieces_have_one_sample() -> None:
    assert weights_of((8, 8, 3), 8, lambda _: 8) == [1.0] * 3


def test_counts_that_happen_to_be_equal_are_counts_when_others_were_not() -> None:
    size = GivenSize()
    assert size.weights_of([2, 2], [3, 4]) == ([3, 4], 7)
    assert size.weights_of([2, 1], [4, 4]) == ([4, 4], 8)

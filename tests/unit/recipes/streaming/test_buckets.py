"""Batches of like length weigh alike, on each replica and in each epoch."""

from __future__ import annotations

import pytest
import torch

from recipes.streaming.buckets import LengthBuckets

LENGTHS = torch.randint(3, 60, (500,), generator=torch.Generator().manual_seed(1))


def sizes_of(batches: list[list[int]]) -> list[int]:
    return [len(batch) * int(LENGTHS[batch].max()) for batch in batches]


def test_batches_have_as_many_tokens_and_little_padding() -> None:
    batches = list(LengthBuckets(LENGTHS, 400, seed=0))
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    full = sorted(sizes_of(batches))[1:]  # the last one has what was left
    assert max(full) <= 400
    assert min(full) > 400 - 60
    assert 1 - int(LENGTHS.sum()) / sum(sizes_of(batches)) < 0.06


def test_replicas_have_samples_of_the_same_lengths_in_each_step() -> None:
    both = [list(LengthBuckets(LENGTHS, 400, 0, num_replicas=2, rank=rank)) for rank in (0, 1)]
    for one, other in zip(*both, strict=True):
        assert len(one) == len(other)
        assert not set(one) & set(other)
        assert abs(int(LENGTHS[one].max()) - int(LENGTHS[other].max())) <= 6
    assert len({index for half in both for batch in half for index in batch}) == 500


def test_an_epoch_draws_anew_and_has_as_many_batches() -> None:
    buckets = LengthBuckets(LENGTHS, 400, seed=0)
    first = list(buckets)
    assert list(buckets) == first
    buckets.set_epoch(1)
    second = list(buckets)
    assert len(second) == len(first) == len(buckets)
    assert sorted(sizes_of(second)) == sorted(sizes_of(first))
    assert {frozenset(batch) for batch in second} != {frozenset(batch) for batch in first}


def test_a_sample_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens_per_batch=50 is too few for a sample of 59"):
        LengthBuckets(LENGTHS, 50, seed=0)
    with pytest.raises(ValueError, match="1 samples are fewer than 2 data replicas"):
        LengthBuckets(LENGTHS[:1], 400, 0, num_replicas=2)

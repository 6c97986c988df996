from __future__ import annotations

from functools import partial

import pytest

from lightning_dist.engine.planning.memory import (
    RankMemory,
    TrainedPart,
    pipelined,
    replicated,
    sharded,
)

ADAM = TrainedPart(parameter_bytes=4000, activation_bytes=700)


def test_a_replica_has_all_and_buckets_beside_what_it_accumulates() -> None:
    assert replicated(ADAM, 2) == RankMemory(4000, 4000, 8000, 700)
    assert replicated(ADAM, 2).peak == 16_700
    assert replicated(ADAM, 2, accumulates=True).buffers == 4000
    assert replicated(ADAM, 1, accumulates=True).peak == 16_700  # nobody to send to, no buckets


def test_shards_have_their_share_and_the_units_that_are_whole() -> None:
    # 4 bytes of 16 per parameter on each of four ranks, 1000 whole; two units fit into a share.
    assert sharded(ADAM, 4, 1000, 450) == RankMemory(1000, 1000, 2000, 700, unsharded=1000)
    assert sharded(ADAM, 4, 1000, 450).peak == 5700
    # Two units of 600 are 200 more than the share of the gradients.
    assert sharded(ADAM, 4, 1000, 600).buffers == 200
    # A share is rounded up: 4000 / 3.
    assert sharded(ADAM, 3, 0, 0).parameters == 1334


def test_a_stage_has_its_micro_batches_and_versions() -> None:
    assert pipelined(ADAM, 3).activations == 2100
    assert pipelined(ADAM, 3).peak == 18_100
    assert pipelined(ADAM, 2, num_versions=2) == RankMemory(4000, 4000, 8000, 1400, stash=4000)
    assert pipelined(ADAM, 2, num_versions=3, version_bytes=2000).stash == 4000


def test_the_optimizer_decides_what_it_keeps() -> None:
    momentum = TrainedPart(4000, states_per_parameter=1)
    assert replicated(momentum, 1).peak == 12_000


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (partial(replicated, ADAM, 0), "num_replicas=0"),
        (partial(sharded, ADAM, 0, 0, 0), "shard_size=0"),
        (partial(pipelined, ADAM, 0), "num_microbatches_in_flight=0"),
        (partial(pipelined, ADAM, 1, 0), "num_versions=0"),
        (partial(TrainedPart, -1), "parameter_bytes=-1"),
    ],
)
def test_impossible_numbers_are_refused(count: partial[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count()

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dist.engine.planning.balance import memory_limit
from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.partition import partition_layers
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.stash_depth import num_copies

LAYERS = [
    LayerCosts(f"{i}", 1.0, 2.0, activation_bytes=3, resident_bytes=50, version_bytes=10)
    for i in range(6)
]


@pytest.mark.parametrize(
    ("schedule", "count", "versions", "in_flight", "copies"),
    [
        ("1f1b", 4, "stash", [3, 2, 1], [0, 0, 0]),
        ("gpipe", 4, "stash", [4, 4, 4], [0, 0, 0]),
        ("pipedream", 1, "stash", [3, 2, 1], [2, 1, 0]),
        ("pipedream", 1, "vertical_sync", [3, 2, 1], [2, 2, 2]),
        ("pipedream", 1, "none", [3, 2, 1], [0, 0, 0]),
        ("pipedream_2bw", 3, "stash", [3, 2, 1], [1, 1, 0]),
    ],
)
def test_counts_what_is_in_flight_and_the_copies_of_weights(
    schedule: str, count: int, versions: str, in_flight: list[int], copies: list[int]
) -> None:
    shape = PipelineShape(schedule, count, (2, 2, 2), rank=0)
    memory = memory_limit(LAYERS, shape, num_copies(shape, versions), cap_bytes=1000.0)
    assert memory.cap_bytes == 1000.0
    assert list(memory.in_flight) == in_flight
    for stage, flights in enumerate(in_flight):
        held = memory.resident_bytes[0] + flights * memory.flight_bytes[0]
        held += memory.num_copies[stage] * memory.copy_bytes[0]
        assert held == 50 + 3 * flights + 10 * copies[stage]


def test_stages_of_one_rank_share_its_memory() -> None:
    shape = PipelineShape("interleaved_1f1b", 2, (2, 1, 2, 1), rank=0, stages_per_rank=2)
    assert memory_limit(LAYERS, shape, 4 * [0], cap_bytes=1000.0).cap_bytes == 500.0


def test_a_cap_takes_layers_from_the_stage_with_most_in_flight() -> None:
    shape = PipelineShape("pipedream", 1, (3, 3), rank=0)
    layers = [replace(layer, activation_bytes=30) for layer in LAYERS]
    costs = [layer.seconds for layer in layers]
    roomy, tight, hopeless = (
        memory_limit(layers, shape, num_copies(shape, "stash"), cap)
        for cap in (400.0, 350.0, 300.0)
    )
    assert partition_layers(costs, 2, memory=roomy) == [3, 3]
    assert partition_layers(costs, 2, memory=tight) == [2, 4]
    with pytest.raises(ValueError, match="No cut of 6 layers into 2 stages keeps each within 300"):
        partition_layers(costs, 2, memory=hopeless)

"""The bytes that a rank holds at the worst of three moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.layer_costs import (
    LayerCosts,
    activations_of,
    transients_of,
)
from lightning_dist.engine.planning.search.held import (
    bytes_between_stages,
    bytes_per_parameter_byte,
    memory_of_rank,
)
from lightning_dist.engine.planning.search.layout import Layout
from tests.unit.engine.planning.search.models import model

LAYERS = [
    LayerCosts("a", 1.0, 1.0, activation_bytes=30, transient_bytes=8),
    LayerCosts("b", 1.0, 1.0, activation_bytes=20, shared_bytes=5, transient_bytes=14),
    LayerCosts("c", 1.0, 1.0, activation_bytes=10, shared_bytes=2, transient_bytes=7),
]


def test_layers_of_one_rank_share_what_they_pass_on() -> None:
    assert activations_of(LAYERS) == 30 + 15 + 8
    assert activations_of(LAYERS[1:]) == 20 + 8
    assert activations_of([]) == 0
    whole = LayerCosts.of_parts(LAYERS)
    assert (whole.activation_bytes, whole.shared_bytes) == (53, 0)
    assert LayerCosts.of_parts(LAYERS[1:]).shared_bytes == 5


def test_a_backward_has_room_where_later_layers_have_been() -> None:
    assert transients_of(LAYERS) == 7  # b needs 14 where c's 8 were
    assert transients_of(LAYERS, rest_bytes=2) == 5
    assert transients_of(LAYERS[:2]) == 14
    assert LayerCosts.of_parts(LAYERS).transient_bytes == 7


COSTS = model()  # two tensors of optimizer state for each parameter
WHOLE = Layout(MeshShape(), 1)


def of_sizes(sizes: list[int]) -> list[LayerCosts]:
    return [LayerCosts("", 1.0, 1.0, parameter_bytes=size) for size in sizes]


@pytest.mark.parametrize(
    ("backward", "update", "temporary"), [(0, 0, 0), (7, 0, 7), (7, 40, 7), (7, 60, 10)]
)
def test_the_worst_moment_of_a_whole_model(backward: int, update: int, temporary: int) -> None:
    costs = replace(COSTS, update_bytes=float(update))
    memory = memory_of_rank(costs, WHOLE, of_sizes([20, 0, 10]), 50, backward)
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (30, 30, 60)
    assert memory.temporary == temporary
    assert memory.peak == 30 + 30 + 60 + 50 + temporary


def test_replicas_make_their_buckets_anew() -> None:
    replicas = Layout(MeshShape(dp_replicate=2), 1)
    assert memory_of_rank(COSTS, replicas, of_sizes([10, 10]), 5, 0).peak == 5 * 20
    assert memory_of_rank(COSTS, WHOLE, of_sizes([10, 10]), 5, 0).peak == 4 * 20 + 5
    assert memory_of_rank(COSTS, replicas, of_sizes([10, 10]), 500, 0).peak == 4 * 20 + 500


def test_layers_without_parameters_are_no_units() -> None:
    shards = Layout(MeshShape(dp_shard=2), 1)
    assert memory_of_rank(COSTS, shards, of_sizes([10, 0, 10, 0]), 5, 0).unsharded == 20
    assert memory_of_rank(COSTS, shards, of_sizes([0, 0]), 5, 0).unsharded == 0


def staged(num_microbatches: int = 4, **sizes: int) -> Layout:
    return Layout(MeshShape(pp=2, **sizes), 4, num_microbatches=num_microbatches)


def test_stages_have_messages() -> None:
    memory = memory_of_rank(replace(COSTS, update_bytes=60.0), staged(), of_sizes([30]), 50, 7, 4)
    assert (memory.buffers, memory.temporary) == (4, 10)


@pytest.mark.parametrize(("num_microbatches", "gradients"), [(1, 10), (2, 20)])
def test_sharded_stages_accumulate_whole_gradients(num_microbatches: int, gradients: int) -> None:
    layout = staged(num_microbatches, dp_shard=2)
    shards = memory_of_rank(COSTS, layout, of_sizes([5] * 4), 50, 0, 4)
    assert (shards.parameters, shards.optimizer_state, shards.unsharded) == (10, 20, 20)
    assert (shards.gradients, shards.buffers, shards.temporary) == (gradients, 4, 0)
    assert 20 * bytes_per_parameter_byte(2.0, layout) == 10 + 20 + 20 + gradients


@pytest.mark.parametrize(("activations", "temporary"), [(0, 30), (10, 20), (50, 0)])
def test_gradients_are_copied_when_activations_are_gone(activations: int, temporary: int) -> None:
    shards = memory_of_rank(COSTS, staged(dp_shard=2), of_sizes([5, 15]), activations, 0, 0)
    assert shards.temporary == temporary
    replicas = memory_of_rank(COSTS, staged(dp_replicate=2), of_sizes([15, 15]), activations, 0, 0)
    assert replicas.temporary == temporary
    large = memory_of_rank(COSTS, staged(dp_replicate=2), of_sizes([2**30]), activations, 0, 0)
    assert large.temporary == 2 * 25 * 2**20 - activations


@pytest.mark.parametrize(
    ("pp", "stages_per_rank", "pairs"), [(2, 1, [1, 1]), (2, 2, [1, 1]), (3, 1, [1, 2, 1])]
)
def test_messages_go_to_the_ranks_beside(pp: int, stages_per_rank: int, pairs: list[int]) -> None:
    layout = Layout(MeshShape(pp=pp), 8, num_microbatches=8, stages_per_rank=stages_per_rank)
    assert [bytes_between_stages(layout, rank, 3.0) for rank in range(pp)] == [
        9.0 * count for count in pairs
    ]


@pytest.mark.parametrize(("together", "update"), [(False, 60.0), (True, 15.0)])
def test_an_update_needs_what_its_largest_parameter_or_all_of_them_need(
    together: bool, update: float
) -> None:
    costs = replace(COSTS, update_bytes=60.0, updates_together=together)  # of 400 bytes
    layout = Layout(MeshShape(pp=2), 8)
    assert memory_of_rank(costs, layout, of_sizes([100]), 0, 0, 0).temporary == update
    assert memory_of_rank(costs, layout, of_sizes([20]), 0, 0, 0).temporary == min(
        40.0, update / 5 if together else 60.0
    )
    # Two ranks share an update of 90 bytes; 20 of two gathered units are gone by then.
    shards = Layout(MeshShape(dp_shard=2), 8)
    shared = replace(costs, update_bytes=360.0 if together else 90.0)
    assert memory_of_rank(shared, shards, of_sizes([10] * 10), 0, 0).temporary == 45 - 20


FROZEN = [LayerCosts("", 1.0, 1.0, parameter_bytes=10, frozen_bytes=30, buffer_bytes=4)]


@pytest.mark.parametrize(
    ("layout", "parameters", "unsharded"),
    [
        (WHOLE, 10 + 30 + 4, 0),
        (Layout(MeshShape(dp_shard=2), 1), 5 + 15 + 4, 40),
        (staged(dp_replicate=2), 10 + 30 + 4, 0),
        (staged(dp_shard=2), 5 + 15 + 4, 40),
    ],
)
def test_what_is_not_trained_is_held_and_has_no_states(
    layout: Layout, parameters: int, unsharded: int
) -> None:
    memory = memory_of_rank(COSTS, layout, FROZEN, 50, 0)
    trained = 10 // layout.mesh.dp_shard
    assert (memory.parameters, memory.unsharded) == (parameters, unsharded)
    assert memory.optimizer_state == 2 * trained

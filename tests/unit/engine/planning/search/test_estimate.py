"""Estimates against closed forms and the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.links import Link, LinksByKind
from lightning_dist.engine.planning.search.estimate import Estimator
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch
from lightning_dist.engine.planning.traffic import MessageKind
from tests.unit.engine.planning.search.models import model

SLOW = Link(0.5, 10.0)


def estimator(world_size: int, **machine: Any) -> Estimator:
    slow = LinksByKind(SLOW)
    return Estimator(model(tensor=True), Machine(world_size, 1e9, within=slow, **machine))


def test_one_rank() -> None:
    found = estimator(1).estimate(Layout(MeshShape(), 2, partition=(4,)))
    assert found.step_seconds == found.compute_seconds == 4 * 3.0 * 2 + 4.0
    assert found.memory.activations == 2 * (4 * 10 + 6)
    assert (found.memory.parameters, found.memory.optimizer_state) == (400, 800)


def test_replicas_wait_for_a_ring_of_each_bucket() -> None:
    layout = Layout(MeshShape(dp_replicate=2), 1, partition=(4,))
    found = estimator(2).estimate(layout)
    # One bucket, two rounds; all gradients pass the link once.
    assert found.exposed_seconds == pytest.approx(2 * 0.5 + 400 / 10.0)
    assert {name: wait.num_bytes for name, wait in found.waits.items()} == {"gradients": 400}
    assert found.memory.unsharded == found.memory.buffers == 0
    # 100 MiB of gradients in four buckets of 25 MiB, and the rest.
    large = replace(model(), batches=(_with_bytes(model().batches[0], 25 * 2**20),))
    machine = Machine(2, 1e9, within=LinksByKind(Link(0.5, 1e30)))
    assert Estimator(large, machine).estimate(layout).exposed_seconds == pytest.approx(5 * 2 * 0.5)


def _with_bytes(batch: MeasuredBatch, num_bytes: int) -> MeasuredBatch:
    layers = tuple(replace(layer, parameter_bytes=num_bytes) for layer in batch.step.layers)
    return replace(batch, step=replace(batch.step, layers=layers))


def test_replicas_of_stages_wait_for_the_largest_ones_bucket() -> None:
    found = estimator(4).estimate(Layout(MeshShape(pp=2, dp_replicate=2), 1, partition=(2, 2)))
    assert found.waits["gradients"].num_bytes == 200
    assert found.waits["gradients"].seconds == pytest.approx(2 * 0.5 + 200 / 10.0)
    assert "parameters" not in found.waits


def test_replicas_of_tensor_parallel_ranks_wait_for_a_ring_of_each_unit() -> None:
    layout = Layout(MeshShape(dp_replicate=2, tp=2), 1, partition=(4,))
    found = estimator(4).estimate(layout)
    # Five units (the layers and the root), two rounds each.
    sent = sum(layer.parameter_bytes for layer in estimator(4).batch(layout).step.layers)
    assert found.waits["gradients"].num_bytes == sent < 400
    assert found.waits["gradients"].seconds == pytest.approx(5 * 2 * 0.5 + sent / 10.0)


def test_shards_gather_twice_and_update_their_part() -> None:
    found = estimator(2).estimate(Layout(MeshShape(dp_shard=2), 1, partition=(4,)))
    ring = 5 * 0.5 + 200 / 10.0
    assert found.waits["gradients"].seconds == pytest.approx(ring)
    assert found.waits["parameters"].seconds == pytest.approx(2 * ring)
    assert found.compute_seconds == 4 * 3.0 + 2.0
    assert (found.memory.parameters, found.memory.unsharded) == (200, 200)


def test_units_cost_replicas_what_they_cost_a_rank_alone() -> None:
    gather, scatter = Link(0.25, 400.0), Link(0.125, 200.0)
    alone = LinksByKind(SLOW, {MessageKind.ALL_GATHER: gather, MessageKind.REDUCE_SCATTER: scatter})
    layout = Layout(MeshShape(dp_replicate=2, tp=2), 1, partition=(4,))
    plain, found = (estimator(4, **more).estimate(layout) for more in ({}, {"alone": alone}))
    # Gathered twice; the layers and the root are five units.
    held = sum(layer.parameter_bytes for layer in estimator(4).batch(layout).step.layers)
    assert found.waits["parameters"].seconds == pytest.approx(2 * (5 * 0.25 + held / 400))
    more = found.waits["gradients"].seconds - plain.waits["gradients"].seconds
    assert more == pytest.approx(5 * 0.125 + held / 200)
    assert found.waits["parameters"].num_bytes == plain.waits["parameters"].seconds == 0
    for mesh, cut in ((MeshShape(dp_replicate=2), (4,)), (MeshShape(pp=2, dp_replicate=2), (2, 2))):
        whole = Layout(mesh, 1, partition=cut)
        assert estimator(4, alone=alone).estimate(whole) == estimator(4).estimate(whole)
    shards = Layout(MeshShape(dp_shard=2), 1, partition=(4,))
    assert estimator(2, alone=alone).estimate(shards) == estimator(2).estimate(shards)


def test_compute_hides_all_but_one_unit() -> None:
    layout = Layout(MeshShape(dp_replicate=2), 100, partition=(4,))
    exposed = [estimator(2, overlap=o).estimate(layout).exposed_seconds for o in (0.0, 1.0)]
    assert exposed[1] == pytest.approx(exposed[0] / 5)


@pytest.mark.parametrize("count", [2, 8])
def test_stages_fill_and_drain(count: int) -> None:
    layout = Layout(MeshShape(pp=2), count, num_microbatches=count, partition=(2, 2))
    alone = Estimator(model(), Machine(2, 1e9)).estimate(layout)
    assert alone.compute_seconds == count * 6.0 + 2.0
    assert alone.bubble_seconds == 6.0
    slow = estimator(2).estimate(layout)
    assert slow.waits["activations"].seconds >= 2 * (0.5 + 4 / 10.0)
    assert alone.memory.activations == 2 * 20  # two in flight on the first stage, of two layers


def test_each_micro_batch_takes_a_stage_of_its_host() -> None:
    layout = Layout(MeshShape(pp=2), 4, num_microbatches=4, partition=(2, 2))
    found, slower = (
        Estimator(model(), Machine(2, 1e9, stage_seconds=host)).estimate(layout)
        for host in (0.0, 0.5)
    )
    assert slower.step_seconds == pytest.approx(found.step_seconds + (4 + 1) * 0.5)


def test_a_single_micro_batch_does_not_make_ranks_wait_for_slower_ones() -> None:
    for count, waits in ((1, False), (2, True)):
        layout = Layout(MeshShape(pp=2), 2, num_microbatches=count, partition=(2, 2))
        alike, unlike = (
            Estimator(replace(model(), waiting=waiting), Machine(2, 1e9)).estimate(layout)
            for waiting in (1.0, 1.5)
        )
        assert unlike.step_seconds == (1.5 if waits else 1.0) * alike.step_seconds


def test_ranks_that_share_cores_take_turns_with_what_their_host_does() -> None:
    layout = Layout(MeshShape(pp=4), 8, num_microbatches=8, partition=(1, 1, 1, 1))
    shared = [
        Estimator(model(), Machine(4, 1e9, processors=1, stage_seconds=host)).estimate(layout)
        for host in (0.0, 0.5)
    ]
    assert [found.step_seconds for found in shared] == [
        8 * 4 * 3.0 + 4.0,
        8 * 4 * 3.0 + 4.0 + 8 * 0.5,
    ]


def test_updates_of_sharded_parameters_take_more_of_the_host() -> None:
    costs = replace(model(), num_parameters=8)
    layouts = {
        Layout(MeshShape(dp_shard=2), 1, partition=(4,)): 8 * 0.5,
        Layout(MeshShape(pp=2, dp_shard=2), 1, partition=(2, 2)): 4 * 0.5,
        Layout(MeshShape(pp=2), 1, partition=(2, 2)): 0.0,
        Layout(MeshShape(dp_replicate=2), 1, partition=(4,)): 0.0,
    }
    for layout, more in layouts.items():
        world = layout.mesh.world_size
        before, after = (
            Estimator(costs, Machine(world, 1e9, update_seconds=each)).estimate(layout)
            for each in (0.0, 0.5)
        )
        assert after.step_seconds == pytest.approx(before.step_seconds + more)


def test_recomputation_keeps_the_inputs_and_one_layer() -> None:
    layout = Layout(MeshShape(), 2, partition=(4,), recomputes=True)
    found = estimator(1).estimate(layout)
    assert found.compute_seconds == 4 * 4.0 * 2 + 4.0
    assert found.memory.activations == 4 * 8 + 12 + (20 - 8)


def test_tensor_parallel_ranks_wait_inside_of_layers() -> None:
    found = estimator(2).estimate(Layout(MeshShape(tp=2), 1, partition=(4,)))
    assert found.waits["layers' results"].seconds == pytest.approx(8 * 2 * 0.5 + 40.0 / 10.0)
    assert found.compute_seconds == 0.75 * 4 * 3.0 + 3.0
    layout = Layout(MeshShape(tp=2), 1, partition=(4,))
    slower = estimator(2, tensor_seconds=0.5).estimate(layout)
    assert slower.exposed_seconds == pytest.approx(found.exposed_seconds + 8 * 0.5)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}])
def test_a_batch_goes_from_rank_to_rank(sizes: dict[str, int]) -> None:
    shape = MeshShape(dp_replicate=2, **sizes)
    stages = shape.pp
    layout = Layout(shape, 4, num_microbatches=stages, partition=(4 // stages,) * stages)
    where, costs = estimator(shape.world_size).machine, model(tensor=True)
    found = Estimator(replace(costs, sample_bytes=30.0), where).estimate(layout)
    alone = Estimator(costs, where).estimate(layout)
    hops = shape.pp * shape.tp - 1
    wait = hops * (0.5 + 4 * 30.0 / 10.0)
    assert found.waits["batches"].num_bytes == 4 * 30.0
    assert found.step_seconds == pytest.approx(alone.step_seconds + wait)
    assert found.seconds_with_batch == pytest.approx(alone.step_seconds)
    whole = Layout(MeshShape(dp_replicate=shape.world_size), 4, partition=(4,))
    assert (
        "batches" not in Estimator(replace(costs, sample_bytes=30.0), where).estimate(whole).waits
    )


def test_shared_processors_fill_bubbles() -> None:
    layout = Layout(MeshShape(pp=2), 2, num_microbatches=2, partition=(2, 2))
    found = Estimator(model(), Machine(2, 1e9, processors=1)).estimate(layout)
    assert found.compute_seconds == 2 * (2 * 6.0 + 2.0)
    assert found.bubble_seconds == 0.0


def test_the_fullest_rank_of_sharded_stages() -> None:
    layout = Layout(MeshShape(pp=2, dp_shard=2), 4, num_microbatches=4, partition=(3, 1))
    memory = estimator(4).memory(layout)
    assert (memory.parameters, memory.gradients, memory.unsharded) == (150, 300, 300)
    assert memory.activations == 2 * 30


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    (first, *_), layout = model().batches, Layout(MeshShape(dp_shard=2), 1, partition=(4,))
    half = [replace(c, parameter_bytes=50, frozen_bytes=50) for c in first.step.layers]
    frozen = replace(first, step=replace(first.step, layers=tuple(half)))
    machine = Machine(2, 1e9, within=LinksByKind(SLOW))
    waits = [
        Estimator(replace(model(), batches=(batch,)), machine).estimate(layout).waits
        for batch in (first, frozen)
    ]
    whole, half_trained = ({k: wait.num_bytes for k, wait in each.items()} for each in waits)
    assert half_trained["parameters"] == whole["parameters"]
    assert half_trained["gradients"] == whole["gradients"] / 2

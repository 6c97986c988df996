"""The search against all layouts, each estimated."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lightning_dist.engine.planning.links import Link, LinksByKind
from lightning_dist.engine.planning.search.estimate import Estimator
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import ModelCosts
from lightning_dist.engine.planning.search.plan import Plan, Price
from lightning_dist.engine.planning.search.search import (
    Request,
    all_layouts,
    search,
    why,
)
from tests.unit.engine.planning.search.models import model

INSIDE, BETWEEN = LinksByKind(Link(0.01, 1e4)), LinksByKind(Link(0.1, 1e3))


def machine(memory: float, world_size: int = 8, **others: float) -> Machine:
    return Machine(world_size, memory, 2, INSIDE, BETWEEN, **others)  # type: ignore[arg-type]


def drawn(seed: int) -> ModelCosts:
    """Layers of drawn times, whose ranks wait for each other and the batch, and add gradients."""
    costs = model(6, seed, tensor=True)
    return replace(costs, adding_seconds=0.01, waiting=1.1, sample_bytes=5e3)


def by_brute_force(seed: int, where: Machine, request: Request) -> list[tuple[float, Layout]]:
    costs, found = drawn(seed), []
    for layout in all_layouts(costs, where, request):
        estimator = Estimator(costs, where)  # a new one, which remembers nothing of other layouts
        fitting = estimator.fitting(layout)
        if fitting is not None:
            found.append((estimator.estimate(fitting).step_seconds / layout.global_batch, fitting))
    return sorted(found, key=lambda pair: pair[0])


@pytest.mark.parametrize(
    ("memory", "overlap", "batch"),
    [
        (1e9, 0.0, {"global_batch": 24}),
        (1500.0, 0.9, {"batch_size": 6}),
        (900.0, 0.9, {"global_batch": 24}),
    ],
)
def test_the_ten_best_of_all(memory: float, overlap: float, batch: dict[str, int]) -> None:
    where, request = machine(memory, overlap=overlap), Request(**batch)  # type: ignore[arg-type]
    found = search(drawn(1), where, request)
    expected = by_brute_force(1, where, request)[: len(found.plans)]
    times = [plan.seconds_per_sample for plan in found.plans]
    assert times == pytest.approx([seconds for seconds, _ in expected], rel=1e-9)
    assert all(plan.estimate.memory.peak <= memory for plan in found.plans)


def test_bounds_are_bounds() -> None:
    where = machine(1e9)
    estimator = Estimator(drawn(3), where)
    for layout in all_layouts(estimator.costs, where, Request(global_batch=24)):
        cut = estimator.with_partition(layout)
        step = estimator.estimate(cut).step_seconds
        assert estimator.least_seconds(layout) <= step * (1.0 + 1e-9)
        assert estimator.least_bytes(layout) <= estimator.memory(cut).peak + 2


def test_what_loses_and_why() -> None:
    found = search(model(), machine(1e9), Request(global_batch=8))
    assert found.best.reason == ""
    assert all(plan.reason for plan in found.plans[1:])
    estimator = Estimator(model(), machine(1e9))
    cut = found.best.layout.partition
    stages = replace(found.best.layout.mesh, pp=2, dp_replicate=4, dp_shard=1)
    waits = Layout(stages, 2, num_microbatches=1, partition=(2, 2))
    assert why(Plan(waits, estimator.estimate(waits)), found.best, machine(1e9)) == "bubble 46%"
    again = replace(found.best.layout, recomputes=True, partition=cut)
    reason = why(Plan(again, estimator.estimate(again)), found.best, machine(1e9))
    assert reason.endswith("more compute: activations again")
    assert "does not fit by" in why(found.best, found.best, machine(100.0))


def test_a_faster_layout_that_does_not_fit_is_shown() -> None:
    best = search(model(), machine(1e9, world_size=2), Request(global_batch=8)).best
    memory = float(best.estimate.memory.peak - 1)
    found = search(model(), machine(memory, world_size=2), Request(global_batch=8))
    assert found.unfitting[0].layout == best.layout
    assert all("does not fit by" in plan.reason for plan in found.unfitting)
    assert "does not fit by" in str(found)


def test_nothing_fits() -> None:
    costs, request = model(), Request(global_batch=8)
    with pytest.raises(ValueError, match="lacks (.*) B: its fullest rank holds (.*) B") as error:
        search(costs, machine(100.0), request)
    needed = min(
        estimator.memory(estimator.with_partition(layout)).peak
        for estimator in [Estimator(costs, machine(100.0))]
        for layout in all_layouts(costs, machine(100.0), request)
    )
    assert f"lacks {needed - 100} B: its fullest rank holds {needed} B" in str(error.value)
    assert search(costs, machine(float(needed)), request).plans  # what the message promises


def test_no_mesh_divides_the_batch() -> None:
    costs = replace(model(), can_cut=False)
    with pytest.raises(ValueError, match="No mesh of 8 ranks divides global_batch=7"):
        search(costs, machine(1e9), Request(global_batch=7))
    with pytest.raises(ValueError, match="No mesh of 8 ranks has replicas=3:"):
        search(costs, machine(1e9), Request(batch_size=7, replicas=3))


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        Request()
    with pytest.raises(ValueError, match="stale weights"):
        Request(global_batch=8, schedules=("pipedream",))
    with pytest.raises(ValueError, match="per_hour=0"):
        Price(0.0)


def test_whole_batches_and_ties() -> None:
    costs = replace(model(), whole_batches=True, is_tied=True)
    layouts = list(all_layouts(costs, machine(1e9), Request(global_batch=8)))
    assert {layout.num_microbatches for layout in layouts} == {1}
    assert {layout.stages_per_rank for layout in layouts} == {1}
    assert any(layout.mesh.pp > 1 for layout in layouts)


def test_a_plan_as_yaml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    best = search(model(), machine(1e9), Request(global_batch=8)).best
    best.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == best
    saved = (tmp_path / "plan.yaml").read_text()
    for content, message in (
        (b"layout: 3", "This is no plan"),
        (b"", "This is no plan"),
        (b"layout: [3", "This is no plan: .*other.yaml"),
        (b"\x80\x02", "This is no plan: .*other.yaml"),
        (saved.replace("microbatches: 1", "microbatches: 0").encode(), "num_microbatches=0"),
        (saved.replace("pp: 1", "pp: -1").encode(), "pp=-1"),
    ):
        (tmp_path / "other.yaml").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Plan.load(tmp_path / "other.yaml")


def test_prices() -> None:
    found = search(model(), machine(1e9), Request(global_batch=8))
    table = found.table(Price(36.0, samples_per_epoch=800, budget=5.0))
    assert table.headings[-3:] == ("per epoch", "steps in budget", "why not")
    step = found.best.estimate.step_seconds
    assert table.rows[0][-3:-1] == (f"{100 * step * 0.01:,.2f}", f"{5.0 / step / 0.01:,.0f}")


@pytest.mark.long
@pytest.mark.parametrize("memory", [2500.0, 1500.0, 900.0])  # ample, scarce, hardly enough
def test_a_search_for_1024_ranks_and_100_layers(memory: float) -> None:
    start = time.process_time()
    search(model(100, tensor=True), machine(memory, 1024), Request(global_batch=4096))
    print(f"{time.process_time() - start:.1f} s of one core")

"""Which plans are tried, and what the others learn from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.search.layout import BATCHES, Layout
from lightning_dist.engine.planning.search.plan import Plan, Ranking
from lightning_dist.engine.planning.search.search import Request, search
from lightning_dist.engine.planning.search.tried import corrected, next_to_try
from tests.unit.engine.planning.search.test_search import drawn, machine

WHERE = machine(1e9, world_size=2)


def found() -> Ranking:
    return search(drawn(1), WHERE, Request(batch_size=6, num_plans=100))


def best_by_mesh(ranking: Ranking) -> dict[MeshShape, Plan]:
    return {plan.layout.mesh: plan for plan in reversed(ranking.plans)}


def try_all(
    ranking: Ranking, ratio_of: Callable[[Layout], float | None]
) -> dict[Layout, float | None]:
    ratios: dict[Layout, float | None] = {}
    while (plan := next_to_try(ranking, ratios)) is not None:
        assert plan.layout not in ratios
        ratios[plan.layout] = ratio_of(plan.layout)
    return ratios


def test_a_tried_plan_is_known_and_others_take_their_mesh_s_ratio() -> None:
    ranking = found()
    slow, refused, other, *_ = best_by_mesh(ranking).values()
    more = next(p for p in ranking.plans if p.layout.mesh == slow.layout.mesh and p != slow)
    ratios = {slow.layout: 3.0, more.layout: 5.0, refused.layout: None, other.layout: 2.0}
    known = corrected(ranking, ratios, WHERE)
    before = {plan.layout: plan.estimate for plan in ranking.plans}
    assert len(known.plans) == sum(layout.mesh != refused.layout.mesh for layout in before)
    by_mesh = {slow.layout.mesh: 4.0, other.layout.mesh: 2.0}  # medians; of all, 3
    for plan in known.plans:
        expected = before[plan.layout]
        factor = ratios.get(plan.layout) or by_mesh.get(plan.layout.mesh, 3.0)
        taken = plan.estimate.seconds_with_batch
        assert taken == pytest.approx(factor * expected.seconds_with_batch)
        assert plan.estimate.waits.get(BATCHES) == expected.waits.get(BATCHES)
        assert plan.estimate.memory == expected.memory
        own, theirs = plan.estimate.waits, expected.waits
        assert {n: w.num_bytes for n, w in own.items()} == {
            n: w.num_bytes for n, w in theirs.items()
        }
    times = [plan.seconds_per_sample for plan in known.plans]
    assert times == sorted(times)
    assert [bool(plan.reason) for plan in known.plans] == [False] + [True] * (len(times) - 1)
    assert known.tried == (slow.layout, more.layout, other.layout)
    assert "with steps of 3 tried" in known.table().title


def test_the_module_goes_on_no_mesh() -> None:
    ranking = found()
    ratios = try_all(ranking, lambda _: None)
    assert {layout.mesh for layout in ratios} == {*best_by_mesh(ranking)}
    with pytest.raises(ValueError, match="goes on none of"):
        corrected(ranking, ratios, WHERE)


def test_the_best_of_each_mesh_is_tried_first() -> None:
    ranking = found()
    ratios = try_all(ranking, lambda _: 1.0)
    firsts = [plan.layout for plan in ranking.plans if plan in best_by_mesh(ranking).values()]
    assert [*ratios][: len(firsts)] == firsts[:4]


def test_the_plans_that_may_be_the_fastest_are_tried() -> None:
    ranking = found()
    staged = next(plan.layout for plan in ranking.plans if plan.layout.mesh.pp > 1)

    def ratio_of(layout: Layout) -> float:
        """Let the first stages be faster than predicted; so do others seem, until they run."""
        return 0.5 if layout == staged else 1.0

    ratios = try_all(ranking, ratio_of)
    known = corrected(ranking, ratios, WHERE)
    assert known.best.layout == staged
    assert len(best_by_mesh(ranking)) < len(ratios) < 8
    for plan in known.plans:
        if plan.seconds_per_sample <= 1.15 * known.best.seconds_per_sample:
            assert plan.layout in ratios


def test_no_more_than_eight_are_tried() -> None:
    ratios = try_all(found(), lambda layout: 0.5 if layout.mesh.pp > 1 else 1.0)
    assert len(ratios) == 8

"""What stages report of their updates, against closed forms and weights written down by hand."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.stashing.prediction import extrapolated
from lightning_dist.engine.stashing.staleness import StalenessMeter, UpdateReport
from lightning_dist.engine.stashing.versions import WeightVersion
from tests.helpers.processes.threads import connect_turns

NUM_STAGES = 4
STRETCHES = (6, 2, 5)
"""Batches between drains; in the second the pipeline does not fill."""


@dataclass
class Seen:
    """One stage's reports, and its weights and momenta before each update."""

    reports: list[UpdateReport] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)
    history: tuple[int, ...] = ()
    stage_bytes: int = 0


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def train(
    net: nn.Sequential, stage: int, links: Links, schedule: str, predicts: bool, **options: Any
) -> Seen:
    """Runs one stage over all stretches."""
    count = 1 if schedule == "pipedream" else NUM_STAGES
    shape = PipelineShape(schedule, count, (1,) * NUM_STAGES, stage)
    optimizer = torch.optim.SGD(net[stage].parameters(), lr=0.2, momentum=0.9)
    predict = partial(extrapolated, optimizer) if predicts else None
    pipeline = Pipeline(net, shape, links, StageOptions(predict=predict, **options))
    parameters = list(net.parameters())
    seen = Seen(stage_bytes=sum(p.nbytes for p in parameters))

    def step(microbatch: Any) -> Tensor:
        return (net(microbatch.content) - 1.0).square().mean()

    def update() -> None:
        optimizer.zero_grad()
        pipeline.install_gradients()
        seen.weights.append(flat(parameters))
        seen.momenta.append(
            flat(optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in parameters)
        )
        with pipeline.updating():
            seen.reports.append(pipeline.stages.reports[stage])
            optimizer.step()

    data = torch.Generator().manual_seed(1)
    for num_batches in STRETCHES:
        for _ in range(num_batches):
            batch = torch.randn(NUM_STAGES, 3, generator=data, dtype=torch.float64)
            pipeline.train_batch(batch, step)
            if pipeline.has_gradients:
                update()
        for _ in pipeline.drain():
            update()
    seen.history = pipeline.stages.staleness[stage]
    return seen


def train_all(schedule: str, *, predicts: bool = False, **options: Any) -> list[Seen]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(NUM_STAGES)))
    nets = [copy.deepcopy(net.double()) for _ in range(NUM_STAGES)]
    turn = threading.Lock()
    ends = connect_turns(range(NUM_STAGES), turn)

    def run(stage: int) -> Seen:
        try:
            with turn:
                return train(nets[stage], stage, ends[stage], schedule, predicts, **options)
        except BaseException as error:
            for links in ends:
                links.interrupt(error)
            raise

    with ThreadPoolExecutor(NUM_STAGES) as pool:
        return list(pool.map(run, range(NUM_STAGES)))


def by_stretch(of_update: Callable[[int, int], int]) -> list[int]:
    """Lists what a function gives for each update of a stretch and the stretch's length."""
    return [of_update(u, length) for length in STRETCHES for u in range(length)]


def in_flight(stage: int, update: int, length: int) -> range:
    return range(update + 1, min(update + NUM_STAGES - 1 - stage, length - 1) + 1)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("versions", ["stash", "none"])
def test_pipedream_fills_to_its_depth_after_each_drain(versions: str) -> None:
    for stage, seen in enumerate(train_all("pipedream", weight_versions=versions)):
        depth = NUM_STAGES - 1 - stage
        expected = by_stretch(lambda u, _, depth=depth: min(u, depth))
        assert [report.staleness for report in seen.reports] == expected == list(seen.history)
        assert all(report.discrepancy is None for report in seen.reports)

        def stashed(update: int, length: int, stage: int = stage) -> int:
            return len(in_flight(stage, update, length))  # hooks may write behind each of them

        counts = [0] * sum(STRETCHES) if versions == "none" else by_stretch(stashed)
        assert [r.stash_bytes for r in seen.reports] == [c * seen.stage_bytes for c in counts]


def test_vertical_sync_is_as_stale_on_each_stage() -> None:
    last = NUM_STAGES - 1
    for stage, seen in enumerate(train_all("pipedream", weight_versions="vertical_sync")):
        expected = by_stretch(lambda u, _: min(u, last))
        assert [report.staleness for report in seen.reports] == expected == list(seen.history)

        def stashed(update: int, length: int, stage: int = stage) -> int:
            # Each batch that fills the pipeline has its own, for hooks may write behind it.
            fill = last - stage
            used = {min(b, fill) + max(0, b - last) for b in in_flight(stage, update, length)}
            kept = {fill + k for k in range(max(0, update + 1 - stage), update + 1)}
            return len(used | kept)

        counts = by_stretch(stashed)
        assert [r.stash_bytes for r in seen.reports] == [c * seen.stage_bytes for c in counts]


@pytest.mark.parametrize("measures", [False, True])
def test_2bw_is_one_update_late_on_each_stage(measures: bool) -> None:
    for stage, seen in enumerate(train_all("pipedream_2bw", measure_discrepancy=measures)):
        expected = by_stretch(lambda u, _: min(u, 1))
        assert [report.staleness for report in seen.reports] == expected == list(seen.history)
        # The last stage has no use for an older version but to compare.
        is_last = stage == NUM_STAGES - 1 and not measures
        counts = by_stretch(lambda u, n, is_last=is_last: int(u < n - 1 and not is_last))
        assert [r.stash_bytes for r in seen.reports] == [c * seen.stage_bytes for c in counts]
        if measures:
            assert_discrepancies(seen)


def test_a_synchronous_schedule_is_never_stale() -> None:
    for seen in train_all("1f1b", measure_discrepancy=True):
        assert seen.reports == [UpdateReport(0, 0, 0.0)] * sum(STRETCHES)
        assert seen.history == (0,) * sum(STRETCHES)


def assert_discrepancies(seen: Seen) -> None:
    """Compares with the weights as they were so many updates before."""
    expected = [
        distance(seen.weights[u - report.staleness], seen.weights[u])
        for u, report in enumerate(seen.reports)
    ]
    assert [report.discrepancy for report in seen.reports] == pytest.approx(expected, abs=1e-14)
    assert any(expected) == any(seen.history)


@pytest.mark.parametrize("versions", ["stash", "vertical_sync", "none"])
def test_the_discrepancy_is_how_far_the_weights_have_moved(versions: str) -> None:
    for seen in train_all("pipedream", weight_versions=versions, measure_discrepancy=True):
        assert_discrepancies(seen)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_the_discrepancy_of_predicted_weights(schedule: str) -> None:
    plain = train_all(schedule, measure_discrepancy=True)
    for stage, seen in enumerate(train_all(schedule, predicts=True, measure_discrepancy=True)):
        expected = []
        for u, report in enumerate(seen.reports):
            then, ahead = u - report.staleness, sum(0.9**k for k in range(1, report.staleness + 1))
            forward = seen.weights[then] - 0.2 * ahead * seen.momenta[then]
            expected.append(distance(forward, seen.weights[u]))
        assert [r.discrepancy for r in seen.reports] == pytest.approx(expected, abs=1e-14)
        if stage == 0:
            mean = sum(r.discrepancy or 0.0 for r in plain[stage].reports) / len(expected)
            assert sum(expected) / len(expected) < mean


def test_the_oldest_version_of_an_update_counts() -> None:
    released: list[WeightVersion] = []
    meter = StalenessMeter(released.append, measures_discrepancy=True)
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    for index in (4, 2, 3):
        copies = {"weight": torch.tensor([3.0, float(index)])}
        meter.end_backward(WeightVersion(index, copies=copies), 7)
    assert not released
    assert meter.measure(7, 5, lambda: {"weight": weight}) == (3, pytest.approx(2 / 5))
    assert len(released) == 3
    meter.end_backward(WeightVersion(5), 8)
    meter.clear()
    assert meter.measure(8, 6, lambda: {"weight": weight}) == (0, 0.0)
    assert meter.history == (3, 0)


def test_a_stage_without_parameters_has_not_moved() -> None:
    meter = StalenessMeter(lambda _: None, measures_discrepancy=True)
    meter.end_backward(WeightVersion(0), 0)
    assert meter.measure(0, 2, dict) == (2, 0.0)


def test_versions_are_released_at_once_where_nobody_compares() -> None:
    released: list[WeightVersion] = []
    StalenessMeter(released.append).end_backward(WeightVersion(0), 0)
    assert len(released) == 1

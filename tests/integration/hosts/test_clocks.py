"""Hosts whose clocks are apart: the ranks' timeline is on one clock all the same.

Linux has no namespace for the time of day. The package reads it by ``time.time`` alone, and so do
these ranks: they are given one that is ahead.
"""

from __future__ import annotations

import time

import pytest

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StepProfiler
from lightning_dist.engine.profiling.record import ClockOffset
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind, Timeline
from tests.helpers.hosts.cluster import hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.integration.hosts.common import Unlogged

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

AHEAD_SECONDS = 5.0


def profile(folder: str) -> tuple[Timeline, tuple[ClockOffset, ...]]:
    profiler = StepProfiler(active_steps=4, warmup_steps=1, trace_dir=folder)
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=4)
    trainer = make_trainer(num_nodes=2, devices=1, strategy=strategy, callbacks=[profiler])
    true_time = time.time
    try:
        if trainer.global_rank == 1:
            time.time = lambda: true_time() + AHEAD_SECONDS
        trainer.fit(make_module(Unlogged), make_loader(80))
    finally:
        time.time = true_time
    assert profiler.report is not None
    return profiler.report.timeline, profiler.report.offsets


def computed(timeline: Timeline, rank: int, kind: ActionKind) -> list[tuple[float, float]]:
    """Returns begin and end of a rank's actions of a kind."""
    return sorted(
        (span.start_seconds, span.end_seconds)
        for span in timeline.spans
        if (span.rank, span.kind, span.action.kind) == (rank, SpanKind.COMPUTE, kind)
    )


@pytest.mark.long
def test_no_stage_begins_before_its_input_was_made() -> None:
    with hosts(2) as cluster:
        workers = HostWorkers(cluster)
        ranks = workers.run_on([0, 1], profile, str(cluster.disk), timeout=200.0)
        workers.close()
    (timeline, offsets), _ = ranks
    bound = offsets[1].uncertainty_seconds
    assert abs(offsets[1].seconds - AHEAD_SECONDS) <= bound + 0.01
    for kind, first, second in ((ActionKind.FORWARD, 0, 1), (ActionKind.BACKWARD, 1, 0)):
        makers, users = computed(timeline, first, kind), computed(timeline, second, kind)
        assert len(makers) == len(users) > 4
        for (_, made), (begun, _) in zip(makers, users, strict=True):
            assert made < begun + bound

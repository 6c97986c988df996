"""What is joined from ranks that followed the simulator to the letter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dist.engine.profiling.account import Use, account_for
from lightning_dist.engine.profiling.bubble import measured_costs, predicted_timeline
from lightning_dist.engine.profiling.exposure import Exposure
from lightning_dist.engine.profiling.record import (
    ClockOffset,
    Phase,
    PhaseKind,
    RankPlace,
    RankRecord,
)
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.profiling.summary import memory_table, summary_table, time_table
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.simulator import StageCosts
from lightning_dist.engine.schedules.timeline import Span, SpanKind
from tests.unit.engine.profiling.reports import (
    COSTS,
    LOADING_SECONDS,
    STEP_SECONDS,
    record_of,
    report_of,
)


def test_clocks_are_made_one() -> None:
    report = report_of()
    assert [record.steps[0][0] for record in report.records] == pytest.approx([0.0, 0.0])
    spans = {str(s.action): s for s in report.timeline.spans if s.start_seconds < STEP_SECONDS}
    assert spans["1F0"].start_seconds == pytest.approx(spans["0F0"].end_seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_the_measured_bubble_is_the_predicted_one(schedule: str) -> None:
    report = report_of(schedule)
    assert report.bubble_fraction == pytest.approx(report.predicted_bubble_fraction, abs=1e-9)
    assert report.bubble_fraction is not None
    assert 0.2 < report.bubble_fraction < 0.5
    assert report.predicted_timeline is not None
    assert report.predicted_timeline.makespan_seconds < STEP_SECONDS


def test_costs_come_back_as_they_went_in() -> None:
    report = report_of("zb_h1")
    found = measured_costs(report.timeline.spans, 2)
    assert found is not None
    assert found.forward_seconds == pytest.approx(COSTS.forward_seconds)
    assert found.backward_seconds == pytest.approx(COSTS.backward_seconds)
    assert found.update_seconds == pytest.approx(COSTS.update_seconds)
    assert found.input_share == pytest.approx(COSTS.input_share)
    assert measured_costs(report.timeline.spans, 3) is None


def test_an_asynchronous_pipeline_that_is_never_idle() -> None:
    record = record_of(0, "1f1b")
    shape = replace(record.place.shape, schedule="pipedream", num_microbatches=1)
    spans = [
        Span(rank, SpanKind.COMPUTE, Action(rank, kind, batch), start, start + 1.0)
        for rank in (0, 1)
        for batch in range(6)
        for kind, start in (
            (ActionKind.FORWARD, 2.0 * batch),
            (ActionKind.BACKWARD, 2.0 * batch + 1),
        )
    ]
    records = [
        replace(
            record,
            place=replace(record.place, rank=r, shape=shape),
            steps=((0.0, 12.0),),
            spans=tuple(s for s in spans if s.rank == r),
            phases=(),
        )
        for r in (0, 1)
    ]
    report = ProfileReport(tuple(records), ())
    assert report.bubble_fraction == pytest.approx(0.0)
    assert report.predicted_bubble_fraction == pytest.approx(0.0)


def test_drains_and_validations_are_no_bubble_of_an_asynchronous_pipeline() -> None:
    record = record_of(0, "1f1b")
    shape = replace(record.place.shape, schedule="pipedream", num_microbatches=1)

    def spans(rank: int, batches: range, begin: float) -> list[Span]:
        return [
            Span(rank, SpanKind.COMPUTE, Action(rank, kind, batch), start, start + 1.0)
            for place, batch in enumerate(batches)
            for kind, start in (
                (ActionKind.FORWARD, begin + 2.0 * place),
                (ActionKind.BACKWARD, begin + 2.0 * place + 1),
            )
        ]

    def measured(rank: int) -> RankRecord:
        # A drain of the first rank alone, from 12 to 13, and a validation until 100.
        drain = [Span(0, SpanKind.COMPUTE, Action(0, ActionKind.BACKWARD, 6), 12.5, 13.0)]
        parts = {0: spans(rank, range(6), 0.0), 1: [] if rank else drain}
        parts[7] = spans(rank, range(7, 13), 100.0)
        return replace(
            record,
            place=replace(record.place, rank=rank, shape=shape),
            spans=tuple(span for part in parts.values() for span in part),
            stretches=tuple(number for number, part in parts.items() for _ in part),
            phases=(Phase(rank, PhaseKind.VALIDATION, 14.0, 100.0),),
        )

    report = ProfileReport((measured(0), measured(1)), ())
    assert report.bubble_fraction == pytest.approx(0.0)


def test_where_the_time_went() -> None:
    account = report_of().accounts[1]
    assert account.step_seconds == pytest.approx(STEP_SECONDS)
    assert account.seconds[Use.FORWARD] == pytest.approx(4 * 0.020)
    assert account.seconds[Use.BACKWARD] == pytest.approx(4 * 0.040)
    assert account.seconds[Use.UPDATE] == pytest.approx(0.005)
    assert account.seconds[Use.DATA_LOADING] == pytest.approx(LOADING_SECONDS)
    assert sum(account.seconds.values()) == pytest.approx(STEP_SECONDS)


def plain(rank: int, backward: float, **changes: object) -> RankRecord:
    """A step of DDP of 10 s: 1 s forward, then backward, then 0.5 s of update."""
    spans = (
        Span(rank, SpanKind.COMPUTE, Action(0, ActionKind.FORWARD, 0), 1.0, 2.0),
        Span(rank, SpanKind.COMPUTE, Action(0, ActionKind.BACKWARD, 0), 2.0, 2.0 + backward),
        Span(rank, SpanKind.UPDATE, Action(0, ActionKind.STEP, 0), 9.0, 9.5),
    )
    record = record_of(0, "1f1b")
    place = RankPlace(rank, f"host{rank}", data_index=rank)
    made = replace(
        record,
        place=place,
        steps=((0.0, 10.0),),
        spans=spans,
        phases=(),
        num_samples=4,
        num_tokens=None,
        layers={},
    )
    return replace(made, **changes)


def test_each_second_counts_once() -> None:
    overlapping = Span(0, SpanKind.COMMUNICATION, Action(0, ActionKind.REDUCE_GRAD, 0), 3.0, 7.0)
    record = plain(0, backward=4.0)
    phases = (
        Phase(0, PhaseKind.CHECKPOINT, 0.0, 1.5),
        Phase(0, PhaseKind.VALIDATION, 7.0, 9.0),
    )
    account = account_for(replace(record, spans=(*record.spans, overlapping), phases=phases))
    assert account.step_seconds == 8.0  # validation is no part of a step
    assert account.seconds[Use.BACKWARD] == 4.0
    assert account.seconds[Use.COMMUNICATION] == 1.0  # from 6 to 7, when the backward is over
    assert account.seconds[Use.CHECKPOINT] == 1.0
    assert account.seconds[Use.OTHER] == 0.5


def test_what_happens_inside_of_a_validation_is_no_part_of_a_step() -> None:
    phases = (
        Phase(0, PhaseKind.VALIDATION, 6.0, 9.0),
        Phase(0, PhaseKind.CHECKPOINT, 7.0, 8.5),
        Phase(0, PhaseKind.DATA_LOADING, 8.5, 9.0),
    )
    account = account_for(replace(plain(0, backward=4.0), phases=phases))
    assert account.step_seconds == 7.0
    assert account.seconds[Use.CHECKPOINT] == account.seconds[Use.DATA_LOADING] == 0.0
    assert sum(account.seconds.values()) == 7.0


def test_exposed_collectives_are_taken_out_of_what_they_happened_in() -> None:
    exposure = Exposure(3.0, 1.5, {"backward": 0.25, "update": 1.0})
    account = account_for(plain(0, backward=4.0, exposure=exposure))
    assert account.seconds[Use.FORWARD] == 1.0
    assert account.seconds[Use.BACKWARD] == 3.0
    assert account.seconds[Use.COMMUNICATION] == 1.5
    assert account.seconds[Use.UPDATE] == 0.0


def test_what_is_exposed() -> None:
    collectives = [(1.0, 4.0), (3.0, 6.0)]
    exposure = Exposure.of(collectives, [(0.0, 2.0), (5.0, 5.5)], {"backward": [(0.0, 5.0)]})
    assert exposure.seconds == 5.0
    assert exposure.exposed_seconds == 3.5
    assert exposure.shares == {"backward": 3.0 / 5.0}


def test_a_straggler_is_named_and_a_heavier_stage_is_none() -> None:
    report = ProfileReport((plain(0, 2.0), plain(1, 6.0), plain(2, 2.2)), ())
    (straggler,) = report.stragglers
    assert (straggler.place.rank, straggler.place.host) == (1, "host1")
    assert straggler.ratio == pytest.approx(7.5 / 3.7)
    assert report.slowest.rank == 1
    assert report_of().stragglers == ()  # the second stage costs twice as much
    assert report_of().slowest.rank == 1
    little = ProfileReport((plain(0, 0.1), plain(1, 0.4)), ())
    assert little.stragglers == ()  # 1.19 times as long, of which nobody takes notice


def test_an_input_bound_run_is_named_with_what_to_change() -> None:
    def loading(rank: int, seconds: float, data_index: int) -> RankRecord:
        record = plain(rank, 2.0, phases=(Phase(rank, PhaseKind.DATA_LOADING, 0.0, seconds),))
        return replace(record, place=replace(record.place, data_index=data_index))

    clocks = (ClockOffset(),) * 3
    # Rank 1 waits for rank 0, which reads for both; rank 2 reads for itself.
    report = ProfileReport((loading(0, 0.2, 0), loading(1, 5.0, 0), loading(2, 0.9, 1)), clocks)
    assert report.metrics["profile/input_wait"] == pytest.approx(0.09)
    assert report.input_wait.place.rank == 2
    assert "input" not in str(summary_table(report))
    bound = ProfileReport((loading(0, 0.2, 0), loading(1, 5.0, 0), loading(2, 1.0, 1)), clocks)
    summary = str(summary_table(bound))
    assert "bounds the run: rank 2 waits 10% of a step for its batches" in summary
    assert "num_workers" in summary


def test_throughput_counts_each_batch_once() -> None:
    replicas = ProfileReport((plain(0, 2.0), plain(1, 2.0)), ())
    assert replicas.samples_per_second == pytest.approx(8 / 10.0)
    assert replicas.tokens_per_second is None
    assert report_of().samples_per_second == pytest.approx(8 / STEP_SECONDS)
    assert report_of().tokens_per_second == pytest.approx(80 / STEP_SECONDS)


def test_flops_and_mfu() -> None:
    report = report_of()
    assert report.flops == 3000
    assert report.mfu is None
    places = [replace(r.place, device="NVIDIA A100", precision="bf16-true") for r in report.records]
    records = [replace(r, place=p) for r, p in zip(report.records, places, strict=True)]
    gpus = ProfileReport(tuple(records), report.offsets)
    assert gpus.mfu == pytest.approx(3000 / STEP_SECONDS / (2 * 312e12))


def test_numbers_and_tables() -> None:
    report = report_of()
    metrics = report.metrics
    assert metrics["profile/step_seconds"] == pytest.approx(STEP_SECONDS)
    assert metrics["profile/communication_bytes"] == 1280
    assert metrics["profile/peak_bytes"] == 6_400_000
    assert metrics["profile/data_loading_share"] == pytest.approx(LOADING_SECONDS / STEP_SECONDS)
    shares = [value for name, value in metrics.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1.0)
    assert "profile/mfu" not in metrics
    summary = str(summary_table(report))
    assert "7 to 9, 3 timed" in summary
    assert "measured, " in summary
    assert "predicted from these costs" in summary
    assert "3000.000 ms apart, known to 0.100 ms" in summary
    assert str(time_table(report)).splitlines()[1].split()[:3] == ["0", "host0", "40.00"]
    assert "predicted" in str(memory_table(report))


@pytest.mark.parametrize("num_stages", [2, 4, 16])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_an_asynchronous_prediction_is_some_depths_long(schedule: str, num_stages: int) -> None:
    """A batch of ``pipedream_2bw`` is a depth by itself, one of ``pipedream`` is not."""
    count = 1 if schedule == "pipedream" else num_stages
    shape = PipelineShape(schedule, count, (1,) * num_stages, 0)
    timeline = predicted_timeline(shape, StageCosts.uniform(num_stages, update_seconds=1.0))
    forwards = [span for span in timeline.spans if span.action.kind is ActionKind.FORWARD]
    assert 3 * num_stages <= len(forwards) / num_stages <= 10 * num_stages
    assert timeline.bubble_fraction == pytest.approx(0.0, abs=0.01)

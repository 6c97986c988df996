"""What replicas send is counted to the byte, and the timeline shows when."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_dist import DDPStrategy
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind, Timeline
from lightning_dist.plotting import plot_timeline
from tests.helpers.networks.models import make_loader, make_module, make_trainer, share_of, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.test_missing_gradients import FIRST_ONLY, Choosing

NUM_SAMPLES = 48
NUM_STEPS = 6


class Seen(L.Callback):
    def __init__(self) -> None:
        self.num_bytes: list[float] = []
        self.shares: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_bytes.append(trainer.callback_metrics["communication/bytes"].item())
        self.shares.append(trainer.callback_metrics["communication/waiting_share"].item())


def fit(accumulate: int, options: dict[str, Any]) -> Any:
    module, seen = make_module(), Seen()
    strategy = DDPStrategy(log_communication=True, **options)
    trainer = make_trainer(
        devices=2, strategy=strategy, accumulate_grad_batches=accumulate, callbacks=[seen]
    )
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module), seen.num_bytes, seen.shares, strategy.timeline


def fit_with_missing_gradients(accumulate: int) -> Any:
    module, seen = make_module(Choosing, plan=FIRST_ONLY), Seen()
    strategy = DDPStrategy(log_communication=True, bucket_megabytes=0.0005)
    trainer = make_trainer(
        devices=2, strategy=strategy, accumulate_grad_batches=accumulate, callbacks=[seen]
    )
    trainer.fit(module, make_loader(80), make_loader(8))
    return seen.shares, strategy.timeline


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_that_lacks_gradients_waits_behind_its_backward(
    workers: WorkerPool, accumulate: int
) -> None:
    for shares, timeline in workers.run(2, fit_with_missing_gradients, accumulate):
        assert len(shares) == 10
        sends = slice(accumulate - 1, None, accumulate)
        assert all(0 < share < 1 for share in shares[sends])
        assert sum(shares) == pytest.approx(sum(shares[sends]))
        for rank in (0, 1):
            waits = [s for s in timeline.spans if s.kind is SpanKind.WAIT and s.rank == rank]
            assert len(waits) == 10 // accumulate
            assert all(span.duration_seconds > 0 for span in waits)


def sizes() -> list[torch.Size]:
    return [p.shape for p in make_module().parameters()]


def whole(element_bytes: int) -> int:
    return sum(shape.numel() for shape in sizes()) * element_bytes


def factors(rank: int) -> int:
    """Bytes of PowerSGD's P and Q, where they are less than half of the matrix; else as it is."""
    total = 0
    for shape in sizes():
        rows, columns = shape[0], shape.numel() // shape[0]
        small = len(shape) > 1 and 2 * (rows + columns) * rank < rows * columns
        total += (rows + columns) * rank if small else shape.numel()
    return total * 8


POWERSGD = {"compression": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 2}


@pytest.mark.parametrize(
    ("accumulate", "options", "expected"),
    [
        (1, {}, [whole(8)] * 6),
        (1, {"compression": "fp16", "bucket_megabytes": 0.001}, [whole(2)] * 6),
        (2, {"compression": "bf16"}, [0, whole(2)] * 3),
        (1, POWERSGD, [whole(8)] * 2 + [factors(1)] * 4),
        (1, {"sync_every": 2, "sync_warmup_steps": 2}, [whole(8)] * 2 + [0, whole(8)] * 2),
    ],
    ids=["none", "fp16", "bf16, accumulated", "powersgd", "local SGD"],
)
def test_bytes_are_exact(
    workers: WorkerPool, accumulate: int, options: dict[str, Any], expected: list[int]
) -> None:
    assert factors(1) < whole(8)
    for _, num_bytes, shares, _ in workers.run(2, fit, accumulate, options):
        assert num_bytes == expected
        assert [share > 0 for share in shares] == [sent > 0 for sent in expected]
        assert all(share < 1 for share in shares)


def of_step(timeline: Timeline, rank: int, step: int) -> dict[tuple[SpanKind, ActionKind], Any]:
    spans: dict[tuple[SpanKind, ActionKind], Any] = {}
    for span in timeline.spans:
        if span.rank == rank and span.action.microbatch_index == step:
            spans.setdefault((span.kind, span.action.kind), []).append(span)
    return spans


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_travel_while_the_backward_runs_or_when_it_is_done(
    workers: WorkerPool, overlap: bool
) -> None:
    options = {"overlap": overlap, "bucket_megabytes": 0.001}
    ranks = workers.run(2, fit, 1, options)
    shares, timeline = ranks[1][2:]
    assert plot_timeline(timeline).axes
    for step in range(1, NUM_STEPS):  # in the first one the buckets are still to be formed
        spans = of_step(timeline, 1, step)
        (forward,) = spans[SpanKind.COMPUTE, ActionKind.FORWARD]
        (backward,) = spans[SpanKind.COMPUTE, ActionKind.BACKWARD]
        (wait,) = spans[SpanKind.WAIT, ActionKind.REDUCE_GRAD]
        (update,) = spans[SpanKind.UPDATE, ActionKind.STEP]
        buckets = spans[SpanKind.COMMUNICATION, ActionKind.REDUCE_GRAD]
        assert forward.end_seconds <= backward.start_seconds
        assert backward.end_seconds == wait.start_seconds
        assert wait.end_seconds == max(bucket.end_seconds for bucket in buckets)
        assert wait.end_seconds <= update.start_seconds
        assert wait.duration_seconds / shares[step] >= update.end_seconds - forward.start_seconds
        starts = [bucket.start_seconds for bucket in buckets]
        assert max(starts) == backward.end_seconds
        assert len(buckets) == 1 if not overlap else min(starts) < backward.end_seconds


def plain_fit(overlap: bool) -> dict[str, Tensor]:
    module = make_module()
    strategy = DDPStrategy(overlap=overlap, bucket_megabytes=0.001)
    trainer = make_trainer(devices=2, strategy=strategy)
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    assert strategy.timeline.spans == ()
    assert "communication/bytes" not in trainer.callback_metrics
    return state_of(module)


def test_neither_changes_the_weights(workers: WorkerPool) -> None:
    plain, late = (workers.run(2, plain_fit, overlap)[0] for overlap in (True, False))
    logged = workers.run(2, fit, 1, {})[0][0]
    for name, value in plain.items():
        assert torch.equal(value, late[name])
        assert torch.equal(value, logged[name])

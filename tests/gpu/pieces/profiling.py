"""StepProfiler on the device's own clock: its times, its FLOPs and MFU, and what it costs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L

from lightning_dist import DDPStrategy, PipelineStrategy
from lightning_dist.callbacks import StepProfiler
from tests.benchmarks import profiler as bench
from tests.gpu.pieces.memory import sizes_of
from tests.gpu.pieces.speed import Trained, loader_of
from tests.gpu.ranks import attempt, trainer_of
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting

WARMUP, ACTIVE, GOAL = 4, 10, 0.05
STRATEGIES = {"ddp": DDPStrategy, "1f1b, 1 stage": partial(PipelineStrategy, num_microbatches=4)}
ROUNDS = 60


class Stopwatch(L.Callback):
    """Times as many batches as the profiler, behind those that it has looked at."""

    def __init__(self, setting: Setting, first: int) -> None:
        self._setting = setting
        self._first = first
        self._marks: list[float] = []

    def on_train_batch_start(self, *rest: Any) -> None:
        if rest[-1] in (self._first, self._first + ACTIVE):
            self._setting.synchronize()
            self._marks.append(time.perf_counter())

    @property
    def step_seconds(self) -> float:
        begin, end = self._marks
        return (end - begin) / ACTIVE


def profiler(setting: Setting) -> Iterator[Row]:
    for name in STRATEGIES:
        try:
            yield from _times(setting, name)
        except Exception as error:
            yield Row(f"StepProfiler, {name}", repr(error), "", Verdict.FAILS)
    for name in STRATEGIES:
        what = f"StepProfiler's overhead, {name}"
        yield attempt(what, partial(_overhead, what, setting, name))


def _times(setting: Setting, name: str) -> Iterator[Row]:
    sizes = sizes_of(setting)
    first = WARMUP + 2 + ACTIVE + 2  # behind counted, examined and timed batches
    watch = Stopwatch(setting, first)
    with tempfile.TemporaryDirectory() as directory:
        measured = StepProfiler(10**6, ACTIVE, directory, warmup_steps=WARMUP)
        options = {
            "callbacks": [measured, watch],
            "limit_val_batches": 0,
            "precision": "bf16-mixed",
        }
        trainer = trainer_of(setting, STRATEGIES[name](), **options)
        trainer.fit(Trained(sizes), loader_of(setting, sizes, first + ACTIVE + 2))
    report = measured.report
    assert report is not None
    ratio = report.step_seconds / watch.step_seconds
    found = f"{report.step_seconds * 1e3:.2f} ms, a stopwatch {watch.step_seconds * 1e3:.2f}"
    verdict = Verdict.HOLDS if abs(ratio - 1.0) <= GOAL else Verdict.MISSES
    wanted = f"within {GOAL:.0%}"
    what = f"StepProfiler, time of a step, {name}"
    yield Row(what, found, wanted, verdict if setting.is_gpu else Verdict.NOTED)
    formula = sizes.flops_per_token * sizes.tokens
    share = report.flops / formula
    counted = f"{report.flops / 1e9:,.1f} GFLOP, {share:.3f} x the formula"
    verdict = Verdict.HOLDS if abs(share - 1.0) <= GOAL else Verdict.MISSES
    what = f"StepProfiler, counted, {name}"  # on a CPU torch has no formula of attention
    yield Row(what, counted, wanted, verdict if setting.is_gpu else Verdict.NOTED)
    mfu = "unknown for this device" if report.mfu is None else f"{report.mfu:.1%}"
    yield Row(f"StepProfiler, MFU in bf16, {name}", mfu)


def _overhead(what: str, setting: Setting, name: str) -> Row:
    rounds = ROUNDS if setting.is_gpu else 3
    with tempfile.TemporaryDirectory() as directory:
        found = bench.switched(name, rounds, directory, setting.accelerator, devices=1)
    seconds = [{mode: times[0] for mode, times in each.items()} for each in found]
    idle, timing = (bench.median_of_pairs(seconds, mode) for mode in (bench.IDLE, bench.TIMING))
    return Row(what, f"idle {idle}, timing {timing}")

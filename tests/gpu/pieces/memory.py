"""Bytes on the device: beside the planner's, with activations computed again, with offload."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.callbacks import StepProfiler
from tests.gpu.pieces.numerics import GLOO, measured
from tests.gpu.pieces.speed import TINY, Sizes, Trained, loader_of
from tests.gpu.ranks import Ranks, open_ranks, trainer_of, within
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import state_of

MIB = 2**20
GOAL, SETTLED_BATCH, BATCHES = 0.05, 3, 8
LARGE = Sizes(vocab=256, width=768, depth=12, heads=12, batch=8, length=512, turns=0)


def sizes_of(setting: Setting) -> Sizes:
    return LARGE if setting.is_gpu else replace(TINY, batch=4)


class DeviceBytes(L.Callback):
    """Notes bytes on the device, beyond those from before the training.

    Args:
        setting: Has the device.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._before = self._allocated()
        self.between_steps = self.peak = 0

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._setting.is_gpu else 0

    def on_train_batch_start(self, *rest: Any) -> None:
        if self._setting.is_gpu and rest[-1] == SETTLED_BATCH:
            self.between_steps = self._allocated() - self._before
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *_: Any) -> None:
        if self._setting.is_gpu:
            self.peak = torch.cuda.max_memory_allocated() - self._before


def warm_up(setting: Setting) -> None:
    """Lets the libraries take their own memory, which belongs to no training."""
    if setting.is_gpu:
        x = torch.randn(256, 256, device=setting.torch_device, requires_grad=True)
        (x @ x).sum().backward()
        torch.cuda.synchronize()


class BuiltLate(Trained):
    """Builds its model in ``configure_model``, where strategies may defer that."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._sizes = sizes
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("cpu"):
                self.model = self._sizes.build()


def train(
    setting: Setting,
    strategy: Any,
    count: int,
    *callbacks: L.Callback,
    module_class: type[Trained] = Trained,
) -> tuple[DeviceBytes, dict[str, Tensor]]:
    """Trains the GPT; returns the bytes on the device, and this rank's parameters on the CPU."""
    gc.collect()
    warm_up(setting)
    sizes, watch = sizes_of(setting), DeviceBytes(setting)
    options = {"callbacks": [*callbacks, watch], "limit_val_batches": 0, "max_epochs": 1}
    trainer = trainer_of(setting, strategy, count, **options)
    module = module_class(sizes)
    torch.manual_seed(1)  # the same batches
    trainer.fit(module, loader_of(setting, sizes, BATCHES))
    return watch, {name: value.cpu() for name, value in state_of(module).items()}


# --- the planner ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A strategy and its ranks."""

    make: Callable[[], Any]
    count: int = 1


def _staged(schedule: str, **options: Any) -> Planned:
    make = partial(PipelineStrategy, schedule=schedule, transport="gloo", **options, **GLOO)
    return Planned(make, 2)


PLANNED = {
    "ddp": Planned(DDPStrategy),
    "fsdp": Planned(FSDPStrategy),
    "pipeline 1f1b, 1 stage": Planned(partial(PipelineStrategy, num_microbatches=4)),
    "pipeline 1f1b, 2 ranks": _staged("1f1b", num_microbatches=4),
    "pipeline pipedream, 2 ranks": _staged("pipedream"),
}


def planner(setting: Setting) -> Iterator[Row]:
    """Compares the peak on the device with what the planner says."""
    with open_ranks(setting) as ranks:
        for name, planned in PLANNED.items():
            what = f"peak of {name}" + (", first rank" if planned.count > 1 else "")
            yield measured(ranks, what, planned.count, compare_peaks, name)


def compare_peaks(setting: Setting, what: str, name: str) -> Row:
    planned = PLANNED[name]
    with tempfile.TemporaryDirectory() as directory:
        profiler = StepProfiler(10**6, 2, directory, warmup_steps=1)
        train(setting, planned.make(), planned.count, profiler)
    assert profiler.report is not None
    memory = profiler.report.records[0].memory
    if memory.predicted is None:
        return Row(what, "the planner has no formula", "", Verdict.LEFT_OUT)
    predicted = memory.predicted.peak
    peak = memory.measured.peak
    if setting.is_gpu:  # without the profiler, which counts a step in its own way
        peak = train(setting, planned.make(), planned.count)[0].peak
    ratio = peak / predicted
    found = f"{peak / MIB:,.1f} MiB, planner {predicted / MIB:,.1f}; {ratio:.3f} x the planner"
    verdict = Verdict.HOLDS if abs(ratio - 1.0) <= GOAL else Verdict.MISSES
    wanted = f"within {GOAL:.0%}"
    return Row(what, found, wanted, verdict if setting.is_gpu else Verdict.NOTED)


# --- activations computed again, shards on the host ----------------------------------------------

EQUAL = 1e-5


def recompute(setting: Setting) -> Iterator[Row]:
    """Trains with activations that are computed again beside training with all of them kept."""
    with open_ranks(setting) as ranks:
        for again in ("full", "selective"):
            options = {"activation_checkpointing": again}
            yield from _beside_plain(ranks, f"FSDPStrategy, checkpointing {again}", options)


def offload(setting: Setting) -> Iterator[Row]:
    """Trains with shards on the host beside training with all on the device."""
    with open_ranks(setting) as ranks:
        options = {"offload": "cpu"}
        yield from _beside_plain(ranks, 'FSDPStrategy(offload="cpu")', options)
        what = 'FSDPStrategy(offload="cpu"), built late: weights'
        yield measured(ranks, what, 1, compare_weights, options, BuiltLate)


def _beside_plain(ranks: Ranks, what: str, options: dict[str, Any]) -> Iterator[Row]:
    yield measured(ranks, f"{what}: weights", 1, compare_weights, options)
    if not ranks.setting.is_gpu:
        yield Row(f"{what}: bytes on the device", "for GPUs", "", Verdict.LEFT_OUT)
        return
    yield measured(ranks, f"{what}: bytes on the device", 1, compare_bytes, options)


def compare_weights(
    setting: Setting, what: str, options: dict[str, Any], module_class: type[Trained] = Trained
) -> Row:
    _, plain = train(setting, FSDPStrategy(), 1)
    _, found = train(setting, FSDPStrategy(**options), 1, module_class=module_class)
    return within(what, max(float((found[n] - plain[n]).abs().max()) for n in plain), EQUAL)


def compare_bytes(setting: Setting, what: str, options: dict[str, Any]) -> Row:
    plain, _ = train(setting, FSDPStrategy(), 1)
    other, _ = train(setting, FSDPStrategy(**options), 1)
    texts = [
        f"{kept / MIB:,.1f} MiB {name}, {now / MIB:,.1f} so"
        for name, kept, now in (
            ("between steps", plain.between_steps, other.between_steps),
            ("at the peak", plain.peak, other.peak),
        )
    ]
    verdict = Verdict.HOLDS if other.peak < plain.peak else Verdict.FAILS
    return Row(what, "; ".join(texts), "a lower peak", verdict)

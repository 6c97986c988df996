"""Whether the host waits for the device in a steady step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from tests.gpu.pieces.in_process import (
    BATCH_SIZE,
    NUM_BATCHES,
    batches,
    make_model,
    make_optimizer,
    shapes,
    step_of,
    update,
)
from tests.gpu.ranks import attempt, trainer_of
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import Classifier, make_loader, make_module
from tests.helpers.processes.threads import run_ranks

WARMUP = 3


class HostReads(TorchDispatchMode):
    """Notes operations by which the host reads a value, and on a GPU would wait for it."""

    NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.found.append(f"{name} in {place_in(traceback.extract_stack())}")
        return func(*args, **(kwargs or {}))


def place_in(frames: traceback.StackSummary) -> str:
    """Returns the innermost place that is neither torch's nor of this file."""
    others = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    return f"{Path(others[-1].filename).name}:{others[-1].lineno}" if others else "torch"


@dataclass
class SyncWatch:
    """Finds where the host waits for the device, once all ranks are warm.

    On a GPU torch raises there, in all threads, from the first rank's :meth:`begin` on. On a CPU
    reads of values are noted, in the thread of the rank.
    """

    setting: Setting
    reads: list[str] = field(default_factory=list)

    def begin(self) -> Callable[[], None]:
        """Begins to look; returns the function that ends it, in the same thread."""
        if self.setting.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
            return lambda: None
        mode = HostReads()
        mode.__enter__()

        def end() -> None:
            mode.__exit__(None, None, None)
            self.reads += mode.found

        return end

    def close(self) -> None:
        if self.setting.is_gpu:
            torch.cuda.set_sync_debug_mode("default")


def no_sync(setting: Setting) -> Iterator[Row]:
    """Runs each schedule on two ranks of this process."""
    what = "a step that reads a value is found"
    yield attempt(what, lambda: _finds_reads(what, setting))
    for name in SCHEDULE_NAMES:
        what = f"steady steps of {name}"
        yield attempt(what, partial(_steady, what, setting, name))


def _steady(what: str, setting: Setting, schedule: str, *, reads_loss: bool = False) -> Row:
    watch = SyncWatch(setting)

    def train(net: nn.Sequential, pipeline: Pipeline) -> None:
        optimizer = make_optimizer(net)
        end: Callable[[], None] = lambda: None  # noqa: E731
        for number, batch in enumerate(data):
            if number == WARMUP:
                end = watch.begin()
            results = pipeline.train_batch(batch, step_of(net))
            if reads_loss:
                [float(result.detach()) for result in results]
            if pipeline.has_gradients:
                update(pipeline, optimizer)
        end()

    data = batches(setting)
    setting.synchronize()
    try:
        make = partial(make_model, setting)
        run_ranks(make, shapes(schedule), train, device=setting.torch_device)
    finally:
        watch.close()
    found = ", ".join(sorted(set(watch.reads))) or "none"
    verdict = Verdict.FAILS if watch.reads else Verdict.HOLDS
    return Row(what, f"host synchronisations: {found}", "none", verdict)


def _finds_reads(what: str, setting: Setting) -> Row:
    """Shows that the search can find something."""
    try:
        row = _steady(what, setting, "gpipe", reads_loss=True)
    except RuntimeError as error:
        found = str(error).splitlines()[0]
        is_found = "synchronizing" in found
        return Row(what, found, "an error", Verdict.HOLDS if is_found else Verdict.FAILS)
    is_found = row.verdict is Verdict.FAILS
    return Row(what, row.found, "some", Verdict.HOLDS if is_found else Verdict.FAILS)


# --- under Lightning -----------------------------------------------------------------------------

STRATEGIES: dict[str, Callable[[], Any]] = {
    "PipelineStrategy": partial(PipelineStrategy, num_microbatches=4),
    "PipelineStrategy('zbv')": partial(PipelineStrategy, schedule="zbv", num_microbatches=4),
    "DDPStrategy": DDPStrategy,
    "FSDPStrategy": FSDPStrategy,
}


def in_fits(setting: Setting) -> Iterator[Row]:
    """Trains under strategies on one rank."""
    for name, make in STRATEGIES.items():
        what = f"steady steps of {name}, 1 rank"
        yield attempt(what, partial(_steady_fit, what, setting, make))


class SteadySteps(L.Callback):
    """Lets a watch look at some steps, from a batch on the device to the end of its update."""

    def __init__(self, watch: SyncWatch) -> None:
        self._watch = watch
        self._end: Callable[[], None] = lambda: None

    def on_train_batch_start(self, *rest: Any) -> None:
        if rest[-1] >= WARMUP:
            self._end = self._watch.begin()

    def on_train_batch_end(self, *rest: Any) -> None:
        if rest[-1] >= WARMUP:
            self._end()
            self._watch.close()


def _steady_fit(what: str, setting: Setting, make: Callable[[], Any]) -> Row:
    watch = SyncWatch(setting)
    options = {"callbacks": [SteadySteps(watch)], "limit_val_batches": 0}
    trainer = trainer_of(setting, make(), **options)
    try:
        trainer.fit(make_module(Quiet), make_loader(NUM_BATCHES * BATCH_SIZE, BATCH_SIZE))
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        place = place_in(traceback.extract_tb(error.__traceback__))
        return Row(what, f"host synchronisations: {place}", "none", Verdict.MISSES)
    finally:
        watch.close()
    found = ", ".join(sorted(set(watch.reads))) or "none"
    # On a CPU values that are on the host anyway, such as votes, are among them.
    verdict = Verdict.HOLDS if setting.is_gpu else Verdict.NOTED
    return Row(what, f"host synchronisations: {found}", "none", verdict)


class Quiet(Classifier):
    """Logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

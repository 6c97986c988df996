"""The private names of Lightning and torchmetrics that this package touches, and some of torch's.

Each function says which name, and why no public one serves. The tests call each of them on the real
objects, so that a renamed attribute fails there and not in a user's run. The names by which batches
are read are in :mod:`.lightning_loaders`, those of the launcher in :mod:`.launcher`. Names that
Lightning's own strategies set or override (``_layer_sync``, ``_checkpoint_io``, ``_launcher``,
``_configure_launcher``) stand in the strategies. A private name of torch that one module needs
stands in that module.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist.engine.tensors.patch import Undo, replace_method, surround_method

SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int

# --- signals and errors --------------------------------------------------------------------------


def replace_sigterm_protocol(trainer: pl.Trainer, before_batch: Callable[[], None]) -> Undo:
    """Takes the blocking broadcasts out of Lightning's handling of SIGTERM.

    ``_sigterm_notifier_fn`` broadcasts in the signal handler, and ``_broadcast_sigterm_tensor``
    before each training batch; there is no switch for either. The rest of Lightning's handler calls
    the handler that was installed before. The trainer must not have registered its handlers yet.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    notifier, broadcast = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor"
    assert hasattr(connector, notifier)
    assert hasattr(loop, broadcast)
    undo = ExitStack()
    undo.callback(replace_method(connector, notifier, lambda *_: None))
    if trainer.world_size > 1:
        undo.callback(replace_method(loop, broadcast, before_batch))
    else:  # a single process broadcasts nothing
        undo.callback(surround_method(loop, "advance", before=before_batch))
    return undo.close


def replace_handler_to_restore(
    trainer: pl.Trainer, signum: signal.Signals, handler: SignalHandler
) -> None:
    """Replaces the signal handler in ``_original_handlers``, restored when a run is over."""
    found = trainer._signal_connector._original_handlers
    if signum in found:
        found[signum] = handler


def replace_requeue(
    trainer: pl.Trainer, on_signal: Callable[[], None], finish_save: Callable[[], None]
) -> tuple[Callable[[], None], Undo]:
    """Takes the save out of Lightning's handler of the signal by which SLURM announces its end.

    ``_slurm_sigusr_handler_fn`` saves wherever the signal has found the process. In
    ``hpc_save_path`` each rank numbers the checkpoint by the files in the directory, while other
    ranks may have begun to write theirs. The trainer must not have registered its handlers yet.
    ``on_signal`` must not wait; ``finish_save`` waits until the checkpoint is whole.

    Returns:
        A collective function that saves and asks SLURM to requeue the job, and the undo.
    """
    signals, checkpoints = trainer._signal_connector, trainer._checkpoint_connector
    own = type(signals)._slurm_sigusr_handler_fn
    own_path = checkpoints.hpc_save_path

    def agreed_path(directory: str) -> str:
        path: str = trainer.strategy.broadcast(own_path(directory))
        return path

    own_save = trainer.save_checkpoint

    def save(*arguments: Any) -> None:
        own_save(*arguments)
        finish_save()

    def requeue() -> None:
        with ExitStack() as undo:
            undo.callback(replace_method(checkpoints, own_path.__name__, agreed_path))
            undo.callback(replace_method(trainer, "save_checkpoint", save))
            own(signals, signal.SIGUSR1, sys._getframe())

    return requeue, replace_method(signals, own.__name__, lambda *_: on_signal())


def set_received_sigterm(trainer: pl.Trainer) -> None:
    """Ends Lightning's loops at their next boundary; the public property is read-only."""
    trainer._signal_connector.received_sigterm = True


def is_raised_in_step(error: BaseException) -> bool:
    """Returns whether an exception was raised in a step, as the traceback shows.

    The methods in which Lightning's loops call a step are private. The strategy's
    ``optimizer_step`` calls a step only in some of the batches.
    """
    steps = {
        _AutomaticOptimization.run.__code__,
        _ManualOptimization.run.__code__,
        _EvaluationLoop._evaluation_step.__code__,
        _PredictionLoop._predict_step.__code__,
    }
    return any(frame.f_code in steps for frame, _ in traceback.walk_tb(error.__traceback__))


# --- loops ---------------------------------------------------------------------------------------


def can_stop_early(trainer: pl.Trainer) -> bool:
    """Returns whether training may end before its last epoch and step.

    A loop obeys ``trainer.should_stop`` if ``_can_stop_early`` says that ``min_epochs`` and
    ``min_steps`` are met. No public name says from when on the loop counts an epoch.
    """
    return trainer.fit_loop._can_stop_early


def is_in_step(trainer: pl.Trainer) -> bool:
    """Returns whether the batch before has left gradients to accumulate: `_should_accumulate`."""
    return trainer.fit_loop._should_accumulate()


def batches_done(trainer: pl.Trainer) -> tuple[int, int, bool]:
    """Returns the latest epoch, its batches that were trained, and whether the epoch has ended.

    The counts are public, but the types of ``epoch_progress`` and ``batch_progress`` do not declare
    them.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return epochs.ready - 1, batches.processed, epochs.processed == epochs.ready


def set_batches_done(trainer: pl.Trainer, count: int) -> None:
    """Sets how many batches of the epoch a resumed loop has behind it, before it goes on.

    No public method changes ``batch_progress``. The loop itself completes a batch that the
    checkpoint has processed and not completed, so that the difference must stay.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    shift = count - progress.current.processed
    for counter in (progress.total, progress.current):
        num_open = counter.processed - counter.completed
        counter.ready = counter.started = counter.processed = counter.processed + shift
        counter.completed = counter.processed - num_open


def validates_by_the_clock(trainer: pl.Trainer) -> bool:
    """Returns whether ``val_check_interval`` is a time, parsed in ``_val_check_time_interval``."""
    return getattr(trainer, "_val_check_time_interval") is not None  # noqa: B009


def change_validation_due(trainer: pl.Trainer, change: Callable[[bool], bool]) -> Undo:
    """Changes whether a training batch is followed by a validation.

    Each rank reads its own clock in ``_should_check_val_fx``, and no hook is called before.
    """
    loop = trainer.fit_loop.epoch_loop
    own = loop._should_check_val_fx
    return replace_method(loop, own.__name__, lambda fetcher: change(own(fetcher)))


# --- logging -------------------------------------------------------------------------------------


@contextmanager
def as_of_training_step(module: pl.LightningModule) -> Iterator[None]:
    """Lets ``self.log`` add to the values that ``training_step`` has logged in this epoch.

    The values of the last batches before a validation, or of an epoch that was stopped, come when
    its steps are over. Then the trainer's stage may be validation already, and ``_current_fx_name``
    names another hook than the one that results are kept under. ``_first_loop_iter`` must be False,
    or Lightning takes the next value for that of a new epoch.
    """
    trainer = module.trainer
    connector, stage = trainer._logger_connector, trainer.state.stage
    iteration = connector._first_loop_iter
    trainer.state.stage, connector._first_loop_iter = RunningStage.TRAINING, False
    try:
        with as_of_hook(module, "training_step"):
            yield
            _ = trainer.callback_metrics  # reads the results anew, for callbacks that monitor one
    finally:
        trainer.state.stage, connector._first_loop_iter = stage, iteration


def hook_of(module: pl.LightningModule) -> str | None:
    """Returns the name of the running hook, a module's or a callback's: ``_current_fx_name``."""
    return module._current_fx_name


@contextmanager
def as_of_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Lets ``self.log`` log as in another hook than the one that is running."""
    present, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = present


def logged_step(trainer: pl.Trainer) -> int:
    """Returns the step at which loggers get the values that a training batch logs.

    Unlike ``global_step``, ``_batches_that_stepped`` counts optimizer steps as loggers do.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_training_step(trainer: pl.Trainer, step: int, *, stops: bool) -> None:
    """Passes the values that ``training_step`` has just logged to the loggers, for an earlier step.

    ``_logger_connector`` would do so at the end of the present batch, at the present step. So the
    values are passed on here, and removed from ``_results``, where each waits in its
    ``_forward_cache``. The trainer does not declare how often loggers are called.

    Args:
        trainer: The trainer, in a training batch or under :func:`as_of_training_step`.
        step: The step of the batch that the values belong to; see :func:`logged_step`.
        stops: Whether the training stops behind that batch, which is then logged in any case.
    """
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    # Reading these keeps the values, for callbacks and the progress bar.
    _ = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    assert trainer._results is not None
    items = [item for item in trainer._results.values() if item.meta.fx == "training_step"]
    names = {item.meta.forked_name(on_step=True) for item in items if item.meta.on_step}
    interval = getattr(trainer, "log_every_n_steps")  # noqa: B009
    is_due = interval > 0 and (stops or (step + 1) % interval == 0)
    if is_due or getattr(trainer, "fast_dev_run"):  # noqa: B009
        now, loop._batches_that_stepped = loop._batches_that_stepped, step
        try:
            values = connector.metrics["log"].items()
            connector.log_metrics({name: value for name, value in values if name in names})
        finally:
            loop._batches_that_stepped = now
    forget_step_values(trainer)


def forget_step_values(trainer: pl.Trainer) -> None:
    """Forgets the values that ``training_step`` logged, lest the next step repeat them."""
    assert trainer._results is not None
    for item in trainer._results.values():
        if item.meta.fx == "training_step":
            item._forward_cache = None


def set_step_value(metric: Metric, value: Tensor | None) -> None:
    """Sets the value that a metric reports for the present step.

    Lightning reads ``_forward_cache`` for ``self.log(metric, on_step=True)``. Only the last stage
    has called the metric's forward.
    """
    setattr(metric, "_forward_cache", value)  # noqa: B010


def step_value(metric: Metric) -> Any:
    """Returns the value that a metric reports for the present step; see :func:`set_step_value`."""
    return metric._forward_cache


# --- modules, plugins and optimizers -------------------------------------------------------------


def set_device(module: pl.LightningModule, device: torch.device) -> None:
    """Sets ``module.device``, which in public only ``.to`` does, by moving all parameters."""
    _update_properties(module, device=device)


def between_backward_and_step(
    precision: Precision, module: pl.LightningModule, optimizer: Optimizer
) -> None:
    """Calls the hooks before an optimizer's step, and clips; also if the step is then skipped.

    The base class of precision plugins does both in ``_after_closure``. Only its own
    ``optimizer_step`` calls it, and that method never skips a step.
    """
    precision._after_closure(module, optimizer)


def move_optimizers(optimizers: list[Optimizer], device: torch.device) -> None:
    """Moves optimizers' states, but for step counters; in public only ``Strategy.setup`` does."""
    _optimizers_to_device(optimizers, device)


def mark_optimizer_called(optimizer: Optimizer) -> None:
    """Marks an optimizer as stepped for LR schedulers, although its first step is still to come.

    The first steps of an asynchronous pipeline fill it, and the first steps in fp16 may be skipped.
    Torch reads ``_opt_called``, and would warn that the scheduler was stepped first.
    """
    setattr(optimizer, "_opt_called", True)  # noqa: B010


def replace_links(trainer: pl.Trainer, link: Callable[[str, str], None]) -> Undo:
    """Replaces ``_link_checkpoint``, by which ``ModelCheckpoint`` links to its last checkpoint.

    It removes the link before it makes another, and does so when the checkpoint may not be written
    yet.
    ``link`` takes the checkpoint's path and the link's.
    """
    undo = ExitStack()
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint):
            name = callback._link_checkpoint.__name__
            undo.callback(replace_method(callback, name, lambda _, *paths: link(*paths)))
    return undo.close


# --- documented, but not declared ----------------------------------------------------------------


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns a trainer's callbacks."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009
    return callbacks


def set_callbacks(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Replaces a trainer's callbacks."""
    setattr(trainer, "callbacks", callbacks)  # noqa: B010


def detects_anomalies(trainer: pl.Trainer) -> bool:
    """Returns the trainer's ``detect_anomaly``, from ``_detect_anomaly``; there is no other."""
    return bool(trainer._detect_anomaly)


def profiler_of(trainer: pl.Trainer) -> Profiler:
    """Returns the profiler that the loop reports to."""
    profiler: Profiler = getattr(trainer, "profiler")  # noqa: B009
    return profiler


def set_profiler(trainer: pl.Trainer, profiler: Profiler) -> None:
    """Replaces a trainer's profiler."""
    setattr(trainer, "profiler", profiler)  # noqa: B010


def set_rank_of_rank_zero_functions(rank: int) -> None:
    """Sets the rank of ``rank_zero_only``."""
    setattr(rank_zero_only, "rank", rank)  # noqa: B010


def default_store() -> dist.Store:
    """Returns the store of the default process group, by torch's ``_get_default_store``.

    Another store would need an address and a port of its own.
    """
    return dist.distributed_c10d._get_default_store()

"""The private names of Lightning and torchmetrics that this package touches, and some of torch's.

Each function says which name, and why no public one serves. The tests call each of them on the real
objects, so that a renamed attribute fails there and not in somebody's run. Of Lightning's only the
launcher's are elsewhere, in :mod:`.base.launcher`. A private name of
torch that one module needs, most often below the strategies, stands in that module:
:mod:`.mesh_runtime.fake_ranks`, :mod:`.sharding.interrupted_step`,
:mod:`.tensors.placements` and others.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from types import FrameType
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_dist.engine.tensors.patch import replace_method

CombinedMode: TypeAlias = Literal["max_size_cycle", "sequential"]
SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int


def between_backward_and_step(
    precision: Precision, module: pl.LightningModule, optimizer: Optimizer
) -> None:
    """Calls the hooks before an optimizer's step, and clips.

    The base class of precision plugins has ``_after_closure`` for that, which only its own
    ``optimizer_step`` calls, and that one never leaves a step out.

    Args:
        precision: Whose.
        module: The user's.
        optimizer: About to step, or not.
    """
    precision._after_closure(module, optimizer)


def set_device(module: pl.LightningModule, device: torch.device) -> None:
    """Makes ``module.device`` what it should be; only ``.to`` does, which moves all parameters.

    Args:
        module: The user's.
        device: Where it computes.
    """
    _update_properties(module, device=device)


def move_optimizers(optimizers: list[Optimizer], device: torch.device) -> None:
    """Moves what optimizers have made when they were built; only ``Strategy.setup`` does.

    Args:
        optimizers: Their counters of steps stay where they are.
        device: Of their parameters.
    """
    _optimizers_to_device(optimizers, device)


def replace_sigterm_protocol(
    trainer: pl.Trainer, before_batch: Callable[[], None]
) -> Callable[[], None]:
    """Takes the blocking broadcasts out of Lightning's handling of SIGTERM.

    ``_sigterm_notifier_fn`` broadcasts in the signal handler, and ``_broadcast_sigterm_tensor``
    before each training batch; there is no switch for either. What is left of Lightning's handler
    calls the one that was there before.

    Args:
        trainer: Must not have registered its signal handlers yet.
        before_batch: Called before each training batch.

    Returns:
        Undoes the changes.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    notifier, broadcast = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor"
    assert hasattr(connector, notifier)
    assert hasattr(loop, broadcast)
    undo_notifier = replace_method(connector, notifier, lambda *_: None)
    undo_broadcast = replace_method(loop, broadcast, before_batch)

    def undo() -> None:
        undo_broadcast()
        undo_notifier()

    return undo


def replace_handler_to_restore(
    trainer: pl.Trainer, signum: signal.Signals, handler: SignalHandler
) -> None:
    """Changes what Lightning puts in place of its own handler of a signal when a run is over.

    Args:
        trainer: May have registered its signal handlers, or not yet.
        signum: The signal.
        handler: Takes the place of the one that was found then, which ``_original_handlers`` keep.
    """
    found = trainer._signal_connector._original_handlers
    if signum in found:
        found[signum] = handler


def replace_requeue(
    trainer: pl.Trainer, on_signal: Callable[[], None]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Takes the save out of Lightning's handler of the signal by which SLURM announces its end.

    ``_slurm_sigusr_handler_fn`` saves wherever the signal has found the process. Each rank numbers
    the checkpoint by what it finds in the directory, in ``hpc_save_path``, while others may have
    begun to write theirs.

    Args:
        trainer: Must not have registered its signal handlers yet.
        on_signal: Called in the handler, so it must do nothing that waits.

    Returns:
        What saves and asks SLURM to run the job again, for all ranks to call, and what undoes the
        change.
    """
    signals, checkpoints = trainer._signal_connector, trainer._checkpoint_connector
    own = type(signals)._slurm_sigusr_handler_fn
    own_path = checkpoints.hpc_save_path

    def agreed_path(directory: str) -> str:
        path: str = trainer.strategy.broadcast(own_path(directory))
        return path

    def requeue() -> None:
        undo_path = replace_method(checkpoints, own_path.__name__, agreed_path)
        try:
            own(signals, signal.SIGUSR1, sys._getframe())
        finally:
            undo_path()

    return requeue, replace_method(signals, own.__name__, lambda *_: on_signal())


def is_raised_in_step(error: BaseException) -> bool:
    """Tells whether an exception comes out of a step, as the traceback shows.

    The methods in which Lightning's loops call a step are private. The strategy's
    ``optimizer_step`` calls it only in some of the batches.

    Args:
        error: Has been raised.
    """
    steps = {
        _AutomaticOptimization.run.__code__,
        _ManualOptimization.run.__code__,
        _EvaluationLoop._evaluation_step.__code__,
        _PredictionLoop._predict_step.__code__,
    }
    return any(frame.f_code in steps for frame, _ in traceback.walk_tb(error.__traceback__))


def replace_torch_layer_sync(strategy: ParallelStrategy, layer_sync: LayerSync) -> None:
    """Puts another plugin in the place of torch's ``SyncBatchNorm``, if the user wants that.

    Args:
        strategy: The trainer's; see :func:`apply_layer_sync`.
        layer_sync: The other one.
    """
    if isinstance(strategy._layer_sync, TorchSyncBatchNorm):
        strategy._layer_sync = layer_sync


def apply_layer_sync(strategy: ParallelStrategy, module: pl.LightningModule) -> None:
    """Makes BatchNorm layers see all ranks where ``sync_batchnorm=True``.

    The Trainer leaves the plugin that does so in ``_layer_sync``.

    Args:
        strategy: The trainer's.
        module: The user's module; changed.
    """
    if strategy._layer_sync is not None:
        strategy._layer_sync.apply(module)


def revert_layer_sync(strategy: ParallelStrategy, module: pl.LightningModule) -> None:
    """Undoes :func:`apply_layer_sync`."""
    if strategy._layer_sync is not None:
        strategy._layer_sync.revert(module)


def default_store() -> dist.Store:
    """Gives the store by which the processes have found each other.

    Another one would need an address and a port of its own; ``_get_default_store`` is the only way
    to this one.
    """
    return dist.distributed_c10d._get_default_store()


def keep_users_samplers(trainer: pl.Trainer) -> None:
    """Keeps Lightning from putting in a ``DistributedSampler``, which would shuffle besides.

    With one data replica there is nothing to share out. ``use_distributed_sampler`` is an argument
    of the Trainer that cannot be changed later, and the strategy is asked for a sampler's arguments
    but not whether there is to be one.
    """
    assert hasattr(trainer._accelerator_connector, "use_distributed_sampler")
    trainer._accelerator_connector.use_distributed_sampler = False


def copy_of_loader(loader: DataLoader[Any], name: str, value: Any) -> DataLoader[Any]:
    """Copies a loader, and sets an attribute of the copy, which refuses that for its samplers.

    To build another one would take the arguments that the user's class was built with.
    ``_iterator`` holds the loader's workers.

    Args:
        loader: Stays as it is.
        name: Of the attribute.
        value: What it is in the copy.
    """
    copied = copy(loader)
    copied.__dict__.update({name: value, "_iterator": None})
    return copied


def is_iterated_by_loop() -> bool:
    """Tells whether the caller, an ``__iter__``, was called by Lightning's loops.

    They do so in the module of :class:`CombinedLoader` alone, whose iterators are private, and give
    no sign of it. A user's hook that iterates a loader of the Trainer does not come that way.
    """
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == CombinedLoader.__module__


def replace_loader_hooks(
    trainer: pl.Trainer, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> Callable[[], None]:
    """Wraps the calls of ``train_dataloader`` and ``val_dataloader``, of modules and data modules.

    Nothing public comes before these hooks; ``_data_source`` calls them.

    Args:
        trainer: About to fit; changed until the returned function is called.
        wrap: Gives what to call in the place of each.

    Returns:
        Undoes the change.
    """
    loop = trainer.fit_loop
    sources = [loop._data_source, loop.epoch_loop.val_loop._data_source]
    for source in sources:
        setattr(source, "dataloader", wrap(source.dataloader))  # noqa: B010

    def undo() -> None:
        for source in sources:
            source.__dict__.pop("dataloader", None)

    return undo


def request_loaders(trainer: pl.Trainer) -> tuple[Any, CombinedMode] | None:
    """Asks for the loaders of a run ahead of it.

    ``setup_data`` of a loop is public, but it is done once: a resumed run would find its loaders
    made before the state that belongs to them. ``_data_source`` knows which hook to call, and
    ``_request_dataloader`` how, for loaders that Lightning has to make anew.

    Args:
        trainer: About to run.

    Returns:
        The loaders, and how the loop combines them; None where there are none.
    """
    loops: dict[TrainerFn, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    assert trainer.state.fn is not None
    source = loops[trainer.state.fn]._data_source
    if not source.is_defined():
        return None
    fits = trainer.state.fn == TrainerFn.FITTING
    return _request_dataloader(source), "max_size_cycle" if fits else "sequential"


def to_step(trainer: pl.Trainer, batch: Any, device: torch.device) -> Any:
    """Makes of a loader's batch what a step is called with, by the hooks that a loop calls.

    Args:
        trainer: About to run.
        batch: From a loader.
        device: Where it should be; ``_on_before_batch_transfer`` comes before.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, device, dataloader_idx=0)


def set_sampler_epoch(trainer: pl.Trainer, dataloader: object) -> None:
    """Tells a training loader's sampler the epoch before its workers ask it for indices.

    Lightning calls ``_set_sampler_epoch`` when an epoch begins. A run that is resumed has started
    the workers by then, and would read its first epoch in the order of epoch 0. Any other run need
    not be told twice.
    """
    epoch = getattr(trainer.fit_loop.epoch_progress.current, "processed")  # noqa: B009
    if epoch:
        _set_sampler_epoch(dataloader, epoch)


def batches_read(trainer: pl.Trainer) -> tuple[int, int | None, bool]:
    """Tells how far the training loader has been read in this epoch.

    The loop counts the batches that it has trained on, not those that there were; who reads the
    loader, ``_data_fetcher``, knows.

    Args:
        trainer: In an epoch of training, or at its end.

    Returns:
        Batches read, the loader's length if it has one, and whether it has ended.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return fetcher.fetched, fetcher.length, fetcher.done


def set_received_sigterm(trainer: pl.Trainer) -> None:
    """Makes Lightning's loops end at their next boundary; the public property is read-only."""
    trainer._signal_connector.received_sigterm = True


def can_stop_early(trainer: pl.Trainer) -> bool:
    """Tells whether training may end before its last epoch and step.

    A loop obeys ``trainer.should_stop`` where ``_can_stop_early`` says that ``min_epochs`` and
    ``min_steps`` are met. Nothing public tells as of when the loop counts an epoch.

    Args:
        trainer: In a fit.
    """
    return trainer.fit_loop._can_stop_early


def validates_by_the_clock(trainer: pl.Trainer) -> bool:
    """Tells whether ``val_check_interval`` is a time; ``_val_check_time_interval`` is it parsed.

    Args:
        trainer: About to fit.
    """
    return getattr(trainer, "_val_check_time_interval") is not None  # noqa: B009


def change_validation_due(
    trainer: pl.Trainer, change: Callable[[bool], bool]
) -> Callable[[], None]:
    """Changes whether a training batch is followed by a validation.

    Each rank reads its own clock in ``_should_check_val_fx``, and no hook is called before.

    Args:
        trainer: About to fit; changed until the returned function is called.
        change: Takes what this rank would do, and gives what it shall do.

    Returns:
        Undoes the change.
    """
    loop = trainer.fit_loop.epoch_loop
    own = loop._should_check_val_fx
    return replace_method(loop, own.__name__, lambda fetcher: change(own(fetcher)))


@contextmanager
def as_of_training_step(module: pl.LightningModule) -> Iterator[None]:
    """Lets ``self.log`` add to what ``training_step`` has logged in this epoch.

    The values of the last batches before a validation, or of an epoch that was stopped, come when
    its steps are over. Then the trainer's stage may be validation already, ``_current_fx_name``
    names another hook than the one that results are kept under, and without ``_first_loop_iter``
    Lightning takes the next value for that of a new epoch.

    Args:
        module: Whose hook is running.

    Yields:
        Nothing.
    """
    trainer = module.trainer
    connector, stage = trainer._logger_connector, trainer.state.stage
    hook, iteration = module._current_fx_name, connector._first_loop_iter
    trainer.state.stage = RunningStage.TRAINING
    module._current_fx_name, connector._first_loop_iter = "training_step", False
    try:
        yield
        _ = trainer.callback_metrics  # reads the results anew, for callbacks that monitor a metric
    finally:
        trainer.state.stage = stage
        module._current_fx_name, connector._first_loop_iter = hook, iteration


def hook_of(module: pl.LightningModule) -> str | None:
    """Gives the name of the hook that is running, which ``_current_fx_name`` has.

    Args:
        module: Whose hook, or a callback's beside it.
    """
    return module._current_fx_name


@contextmanager
def as_of_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Lets ``self.log`` log as in another hook than the one that is running.

    Args:
        module: Whose ``log`` is called.
        hook: Name of the other one.

    Yields:
        Nothing.
    """
    present, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = present


def logged_step(trainer: pl.Trainer) -> int:
    """Gives the step at which loggers get what a training batch logs.

    It counts optimizer steps as loggers do, unlike ``global_step``; ``_batches_that_stepped``.

    Args:
        trainer: In a training batch.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_training_step(trainer: pl.Trainer, step: int, *, stops: bool) -> None:
    """Hands what ``training_step`` has just logged to the loggers, as of an earlier step.

    ``_logger_connector`` would do so at the end of the present batch, at the present step. So the
    values are handed over here, and taken out of ``_results``, where they wait in the
    ``_forward_cache`` of each. How often loggers are called the trainer does not declare.

    Args:
        trainer: In a training batch, or under :func:`as_of_training_step`.
        step: Of the batch whose values they are; see :func:`logged_step`.
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
    """Forgets what ``training_step`` has logged for a step, lest it be logged for the next as well.

    Args:
        trainer: In a training batch, or under :func:`as_of_training_step`; see
            :func:`log_training_step`.
    """
    assert trainer._results is not None
    for item in trainer._results.values():
        if item.meta.fx == "training_step":
            item._forward_cache = None


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Gives a trainer's callbacks; the documented attribute is not declared."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009
    return callbacks


def set_callbacks(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Replaces a trainer's callbacks; see :func:`callbacks_of`."""
    setattr(trainer, "callbacks", callbacks)  # noqa: B010


def profiler_of(trainer: pl.Trainer) -> Profiler:
    """Gives what the loop tells what it does; the attribute is not declared."""
    profiler: Profiler = getattr(trainer, "profiler")  # noqa: B009
    return profiler


def set_profiler(trainer: pl.Trainer, profiler: Profiler) -> None:
    """Replaces it; see :func:`profiler_of`."""
    setattr(trainer, "profiler", profiler)  # noqa: B010


def set_rank_of_rank_zero_functions(rank: int) -> None:
    """Tells ``rank_zero_only`` the rank; the documented attribute of a function is not declared."""
    setattr(rank_zero_only, "rank", rank)  # noqa: B010


def mark_optimizer_called(optimizer: Optimizer) -> None:
    """Tells LR schedulers that the optimizer's first step is only late.

    The first steps of an asynchronous pipeline fill it, and the first steps in fp16 may be left
    out. Torch would warn that the scheduler was stepped before the optimizer; ``_opt_called`` is
    the flag that it looks at.
    """
    setattr(optimizer, "_opt_called", True)  # noqa: B010


def set_step_value(metric: Metric, value: Tensor) -> None:
    """Sets what a metric reports for the present step.

    Lightning reads ``_forward_cache`` for ``self.log(metric, on_step=True)``. Only the last stage
    has called the metric's forward.
    """
    setattr(metric, "_forward_cache", value)  # noqa: B010


def step_value(metric: Metric) -> Any:
    """Gives what a metric reports for the present step; see :func:`set_step_value`."""
    return metric._forward_cache

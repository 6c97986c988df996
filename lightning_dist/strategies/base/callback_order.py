"""Lightning's hooks that a strategy does not get, or gets too late.

A strategy's own hooks run after all callbacks. But the pipeline must be drained before the first
callback reads the weights at the end of training. And an exception must be reported to other ranks
before a callback enters a barrier because of it. The model summary on the other hand must see the
whole model. So the strategy puts one callback before all others and one behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.strategies.base.lightning_internals import callbacks_of, set_callbacks


class FirstCallback(pl.Callback):
    """Runs before the user's callbacks.

    Args:
        show_whole_model: Creates a context manager in which the module looks whole.
        on_train_epoch_end: Called when an epoch has ended, early or not.
        on_train_end: Called when training has ended.
        on_train_epoch_start: Called when an epoch begins.
    """

    def __init__(
        self,
        show_whole_model: Callable[[], AbstractContextManager[None]],
        on_train_epoch_end: Callable[[], None],
        on_train_end: Callable[[], None],
        on_train_epoch_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._show_whole_model = show_whole_model
        self._on_train_epoch_end = on_train_epoch_end
        self._on_train_end = on_train_end
        self._on_train_epoch_start = on_train_epoch_start
        self._shown = ExitStack()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._shown.enter_context(self._show_whole_model())

    def hide(self) -> None:
        """Ends the view of the whole model."""
        self._shown.close()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_train_epoch_start()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_train_epoch_end()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_train_end()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.hide()


class ExceptionListener(pl.Callback):
    """Gets an exception before the user's callbacks, from the start of the processes on.

    Args:
        on_exception: Called with the exception that ended the run.
    """

    def __init__(self, on_exception: Callable[[BaseException], None]) -> None:
        self._on_exception = on_exception

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._on_exception(exception)


class HidingCallback(pl.Callback):
    """Runs behind the callbacks that shall see the whole model.

    Args:
        first: The first callback, whose view this one ends.
    """

    def __init__(self, first: FirstCallback) -> None:
        self._first = first

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first.hide()


def order_callbacks(
    trainer: pl.Trainer,
    *,
    show_whole_model: Callable[[], AbstractContextManager[None]],
    on_train_epoch_end: Callable[[], None],
    on_train_end: Callable[[], None],
    on_train_epoch_start: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Puts the two callbacks around those of a trainer.

    Args:
        trainer: The trainer, changed until the returned function is called.
        show_whole_model: As for :class:`FirstCallback`.
        on_train_epoch_end: As for :class:`FirstCallback`.
        on_train_end: As for :class:`FirstCallback`.
        on_train_epoch_start: As for :class:`FirstCallback`.
    """
    first = FirstCallback(show_whole_model, on_train_epoch_end, on_train_end, on_train_epoch_start)
    added: list[pl.Callback] = [first]
    callbacks: list[pl.Callback] = [first]
    for callback in callbacks_of(trainer):
        if isinstance(callback, LearningRateFinder):  # it trains and saves in `on_fit_start`
            added.append(HidingCallback(first))
            callbacks.append(added[-1])
        callbacks.append(callback)
    added.append(HidingCallback(first))
    set_callbacks(trainer, [*callbacks, added[-1]])

    def undo() -> None:
        set_callbacks(trainer, [c for c in callbacks_of(trainer) if c not in added])

    return undo


def add_first_callback(trainer: pl.Trainer, callback: pl.Callback) -> Callable[[], None]:
    """Adds a callback before those of a trainer."""
    set_callbacks(trainer, [callback, *callbacks_of(trainer)])
    return lambda: set_callbacks(trainer, [c for c in callbacks_of(trainer) if c is not callback])


def mute_checkpoints(trainer: pl.Trainer) -> Callable[[], None]:
    """Keeps callbacks from saving, and from saying so, if ranks did not fail together."""
    undos = ExitStack()
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint):
            saves = callback.save_on_exception
        else:
            saves = isinstance(callback, Checkpoint)
        if saves and is_overridden("on_exception", callback, parent=pl.Callback):
            undos.callback(replace_method(callback, "on_exception", _say_that_nothing_is_saved))
    return undos.close


def _say_that_nothing_is_saved(*_: object) -> None:
    rank_zero_info(
        "No checkpoint was saved because of the exception: not all ranks have failed at the same"
        " place between two steps, so that they have no state in common."
    )

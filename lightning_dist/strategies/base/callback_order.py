"""Lightning's hooks that a strategy does not get, or gets too late.

A strategy's own hooks run after all callbacks. But the pipeline must be drained before the first
callback reads the weights at the end of training. And an exception must be reported to other ranks
before a callback enters a barrier because of it. The model summary on the other hand must see the
whole model. So the strategy puts one callback before all others and one behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.engine.tensors.patch import Undo, replace_method, surround_method
from lightning_dist.strategies.base.lightning_internals import callbacks_of, set_callbacks


def order_callbacks(
    trainer: pl.Trainer,
    *,
    show_whole_model: Callable[[], AbstractContextManager[None]],
    on_train_epoch_start: Callable[[], None],
    on_train_epoch_end: Callable[[], None],
    on_train_end: Callable[[], None],
) -> Undo:
    """Puts one callback before those of a trainer, and one behind them.

    Where the callbacks' ``on_fit_start`` run, the module looks whole by ``show_whole_model``.
    """
    shown = ExitStack()

    def hide(*_: object) -> None:
        shown.close()

    first = LambdaCallback(
        on_fit_start=lambda *_: shown.enter_context(show_whole_model()),
        on_train_epoch_start=lambda *_: on_train_epoch_start(),
        on_train_epoch_end=lambda *_: on_train_epoch_end(),
        on_train_end=lambda *_: on_train_end(),
        on_exception=hide,
    )
    last = LambdaCallback(on_fit_start=hide)
    ordered: list[pl.Callback] = [first]
    for callback in callbacks_of(trainer):
        if isinstance(callback, LearningRateFinder):  # it trains and saves in `on_fit_start`
            ordered.append(last)
        ordered.append(callback)
    set_callbacks(trainer, [*ordered, last])

    def undo() -> None:
        set_callbacks(trainer, [c for c in callbacks_of(trainer) if c not in (first, last)])

    return undo


def add_first_callback(trainer: pl.Trainer, callback: pl.Callback) -> Undo:
    """Adds a callback before those of a trainer."""
    set_callbacks(trainer, [callback, *callbacks_of(trainer)])
    return lambda: set_callbacks(trainer, [c for c in callbacks_of(trainer) if c is not callback])


def drain_before_validation(module: pl.LightningModule, drain: Callable[[], None]) -> Undo:
    """Drains before each validation inside of ``fit``, which needs final weights.

    An asynchronous pipeline has batches in flight, and the replicas of local SGD differ. The module
    must still be in training mode, or a backward that recomputes activations would do so without
    dropout. Lightning's first hook then is ``on_validation_model_zero_grad``, which it leaves out
    while gradients accumulate, and the next one ``on_validation_model_eval``.
    """
    trainer = module.trainer
    batches = trainer.fit_loop.epoch_loop
    drained_at = -1

    def first() -> None:
        nonlocal drained_at
        drain()
        drained_at = batches.total_batch_idx

    def second() -> None:
        if not trainer.sanity_checking and drained_at != batches.total_batch_idx:
            drain()

    with ExitStack() as undo:
        undo.callback(surround_method(module, "on_validation_model_zero_grad", before=first))
        undo.callback(surround_method(module, "on_validation_model_eval", before=second))
        return undo.pop_all().close


def is_overridden_by_user(names: Collection[str], module: pl.LightningModule) -> bool:
    """Returns whether the module or a user's callback has one of some hooks."""
    ours = ("lightning", "lightning_dist")
    callbacks = [
        callback
        for callback in callbacks_of(module.trainer)
        if isinstance(callback, LambdaCallback)  # which has functions of the user
        or type(callback).__module__.partition(".")[0] not in ours
    ]
    return any(
        is_overridden(name, module) or any(_has(callback, name) for callback in callbacks)
        for name in names
    )


def _has(callback: pl.Callback, name: str) -> bool:
    """Looks at the instance too, where ``LambdaCallback`` has any callable."""
    own, default = (getattr(kind, name, None) for kind in (type(callback), pl.Callback))
    return name in vars(callback) or own is not default


def mute_checkpoints(trainer: pl.Trainer) -> Undo:
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

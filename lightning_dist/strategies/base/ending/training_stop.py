"""Training ends on all ranks at the same batch, whoever asks for it.

A rank may set ``trainer.should_stop``, or return -1 from its module's ``on_train_batch_start`` to
skip the rest of an epoch. Lightning obeys on that rank alone, and the others wait for its gradients
until the process group's timeout. Here the ranks decide together. What all of them ask for happens
where it does on a single device. What only some ask for happens some batches later: one, or as many
as a rank can be ahead of another. A validation that is due by the clock is decided on likewise.

A rank's wish to stop waits until ``min_epochs`` and ``min_steps`` are met, as Lightning's does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dist.engine.comms.joint_decision import JointDecision
from lightning_dist.engine.comms.stop_agreement import Posted
from lightning_dist.engine.tensors.replaced_method import replace_method
from lightning_dist.strategies.base import lightning_internals

_SKIP = -1  # Lightning's word for it


def stop_training_together(
    trainer: pl.Trainer,
    group: dist.ProcessGroup,
    lag: int,
    post: Callable[[int], Posted],
    check_batch: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Puts joint decisions where Lightning's loops look at a rank's own.

    Validation is decided on by ``should_stop`` too, in ``on_advance_end``. Other places are ends of
    loops, where all ranks meet.

    Args:
        trainer: Set up to fit; changed until the returned function is called.
        group: A gloo group of all ranks.
        lag: By how many batches one rank can be ahead of another.
        post: Posts a vote behind a batch, with what is agreed on before the next one.
        check_batch: Called behind each training batch, ahead of a validation.

    Returns:
        Undoes the changes.
    """
    stop = JointDecision(group, lag, post)

    def decide() -> None:
        check_batch()
        if lightning_internals.can_stop_early(trainer):
            trainer.should_stop = stop.at_boundary(trainer.should_stop)

    def settle() -> None:
        if lightning_internals.can_stop_early(trainer):
            trainer.should_stop = stop.settle(trainer.should_stop)

    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    changes = [
        _change(batches, "on_advance_end", before=decide),
        _change(batches.val_loop, "run", after=settle),
        _change(batches, "on_run_start", after=settle),
        _change(epochs, "on_run_start", after=settle),
        _change(epochs, "on_advance_end", after=settle),
    ]
    if is_overridden("on_train_batch_start", trainer.lightning_module):
        changes.append(_skip_together(trainer, JointDecision(group, lag)))
    if lightning_internals.validates_by_the_clock(trainer):
        validate = JointDecision(group, lag)
        changes.append(lightning_internals.change_validation_due(trainer, validate.at_boundary))

    def undo() -> None:
        for undo_change in reversed(changes):
            undo_change()

    return undo


def _skip_together(trainer: pl.Trainer, skip: JointDecision) -> Callable[[], None]:
    module = trainer.lightning_module
    own = module.on_train_batch_start

    @wraps(own)
    def on_train_batch_start(*args: Any, **kwargs: Any) -> int | None:
        response = own(*args, **kwargs)
        return _SKIP if skip.at_boundary(response == _SKIP) else None

    undo_hook = replace_method(module, "on_train_batch_start", on_train_batch_start)
    undo_end = _change(trainer.fit_loop, "on_advance_end", before=skip.forget)

    def undo() -> None:
        undo_end()
        undo_hook()

    return undo


def _nothing() -> None:
    """Does nothing."""


def _change(
    owner: object,
    name: str,
    before: Callable[[], None] = _nothing,
    after: Callable[[], None] = _nothing,
) -> Callable[[], None]:
    own = getattr(owner, name)

    @wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        before()
        result = own(*args, **kwargs)
        after()
        return result

    return replace_method(owner, name, method)

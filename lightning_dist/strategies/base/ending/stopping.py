"""Training and evaluation end on all ranks at the same batch, whichever rank asks for it.

In training a rank may set ``trainer.should_stop``, or return -1 from its module's
``on_train_batch_start`` to skip the rest of an epoch. Lightning obeys on that rank alone, and the
others wait for its gradients until the process group's timeout. Here the ranks decide together. If
all ranks ask, the stop comes at the same place as on a single device. If only some ask, it comes
some batches later: one, or as many as a rank can be ahead of another. A validation that is due by
the clock is decided likewise. In training each step synchronises the ranks, and the guard's
agreement goes with it. Evaluating replicas share nothing until their metrics are combined, and may
have different numbers of batches. They agree before each batch that all of them have.

Inside of ``fit`` a validation is not cut short. Lightning would resume it in its middle, with new
metrics, and callbacks that show other weights meanwhile would have them saved as the trained ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dist.engine.comms.votes import JointDecision, PendingSum
from lightning_dist.engine.tensors.patch import Undo, replace_method, surround_method
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.ending.run_guard import RunGuard

_SKIP = -1  # Lightning's value for it


def stop_evaluations_together(
    trainer: pl.Trainer, guard: RunGuard, all_have: Callable[[int, int], bool]
) -> Undo:
    """Lets the ranks of ``validate``, ``test`` and ``predict`` agree to stop.

    Args:
        trainer: The trainer.
        guard: Stops this rank.
        all_have: Takes a batch's index and its loader's; returns whether all ranks have it.
    """

    def before_batch(
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if all_have(batch_idx, dataloader_idx):
            guard.stop_if_agreed()

    callback = LambdaCallback(
        on_validation_batch_start=before_batch,
        on_test_batch_start=before_batch,
        on_predict_batch_start=before_batch,
    )
    return add_first_callback(trainer, callback)


def stop_training_together(
    trainer: pl.Trainer,
    joint: Callable[..., JointDecision],
    *,
    post: Callable[[int], PendingSum],
    end_batch: Callable[[], None],
) -> Undo:
    """Replaces a rank's own decisions in Lightning's loops by joint decisions of all ranks.

    A request to stop waits until ``min_epochs`` and ``min_steps`` are met, as Lightning's does. A
    validation depends on ``should_stop`` too, in ``on_advance_end``. The other places are ends of
    loops, where all ranks meet.

    Args:
        trainer: The trainer, set up to fit.
        joint: Creates this rank's part in a recurring decision. Collective.
        post: Posts a vote behind a batch, together with the vote before the next batch.
        end_batch: Called after each training batch, before a validation.
    """
    stop = joint(post)

    def decide() -> None:
        end_batch()
        if lightning_internals.can_stop_early(trainer):
            trainer.should_stop = stop.at_boundary(trainer.should_stop)

    def decide_now() -> None:
        if lightning_internals.can_stop_early(trainer):
            trainer.should_stop = stop.decide_now(trainer.should_stop)

    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    undo = ExitStack()
    undo.callback(surround_method(batches, "on_advance_end", before=decide))
    undo.callback(surround_method(batches.val_loop, "run", after=decide_now))
    undo.callback(surround_method(batches, "on_run_start", after=decide_now))
    undo.callback(surround_method(epochs, "on_run_start", after=decide_now))
    undo.callback(surround_method(epochs, "on_advance_end", after=decide_now))
    module = trainer.lightning_module
    if is_overridden("on_train_batch_start", module):
        skip = joint()
        own = module.on_train_batch_start

        @wraps(own)
        def on_train_batch_start(*args: Any, **kwargs: Any) -> int | None:
            response = own(*args, **kwargs)
            return _SKIP if skip.at_boundary(response == _SKIP) else None

        undo.callback(replace_method(module, "on_train_batch_start", on_train_batch_start))
        undo.callback(surround_method(epochs, "on_advance_end", before=skip.forget))
    if lightning_internals.validates_by_the_clock(trainer):
        validate = joint()
        undo.callback(lightning_internals.change_validation_due(trainer, validate.at_boundary))
    return undo.close

"""Training and evaluation end on all ranks at the same batch, whichever rank asks for it.

In training a rank may set ``trainer.should_stop``, or return -1 from its module's
``on_train_batch_start`` to skip the rest of an epoch. Lightning obeys on that rank alone, and the
others wait for its gradients until the process group's timeout. Here the ranks decide together. If
all ranks ask, the stop comes at the same place as on a single device. If only some ask, it comes
some batches later: one, or as many as a rank can be ahead of another. A validation that is due by
the clock is decided likewise.

A rank's request to stop waits until ``min_epochs`` and ``min_steps`` are met, as Lightning's does.

In training each step synchronises the ranks, and the guard's agreement goes with it. Evaluating
replicas share nothing until their metrics are combined, and may have different numbers of batches.
They agree before each batch that all of them have; the remaining few batches run to their end.

A validation between batches also needs the weights to be final: an asynchronous pipeline has
batches in flight, and the replicas of local SGD differ. So the strategy drains before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_dist.engine.comms.votes import JointDecision, Posted
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.ending.run_guard import RunGuard


def drain_before_validation(
    module: pl.LightningModule, drain: Callable[[], None]
) -> Callable[[], None]:
    """Drains before each validation inside of ``fit``.

    ``on_validation_model_zero_grad`` is the one hook that Lightning calls exactly then while the
    module is still in training mode. Later hooks come after ``module.eval()``, where a backward
    that recomputes activations would do so without dropout.

    Args:
        module: The user's module; changed until the returned function is called.
        drain: Runs the backwards in flight.
    """
    release_gradients = module.on_validation_model_zero_grad

    def drain_and_release() -> None:
        drain()
        release_gradients()

    return replace_method(module, "on_validation_model_zero_grad", drain_and_release)


def stop_evaluations_together(
    trainer: pl.Trainer, guard: RunGuard, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Lets the ranks of ``validate``, ``test`` and ``predict`` agree to stop.

    Args:
        trainer: The trainer, changed until the returned function is called.
        guard: Combines the ranks' requests to stop.
        group: A gloo group of all ranks.
    """
    return add_first_callback(trainer, EvaluationStop(guard, group))


class EvaluationStop(pl.Callback):
    """Stops before a batch if the ranks agree to.

    Args:
        guard: Combines the ranks' requests to stop.
        group: A gloo group of all ranks.
    """

    def __init__(self, guard: RunGuard, group: dist.ProcessGroup) -> None:
        self._guard = guard
        self._group = group
        self._common: list[int] = []

    def _start(self, lengths: Sequence[int | float]) -> None:
        """Counts the batches of each loader that all ranks have; none if a length is unknown."""
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, list(lengths), group=self._group)
        self._common = [
            0 if float("inf") in same else min(same) for same in zip(*everyone, strict=False)
        ]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.num_predict_batches)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx < self._common[dataloader_idx]:
            self._guard.stop_if_agreed()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


_SKIP = -1  # Lightning's value for it


def stop_training_together(
    trainer: pl.Trainer,
    group: dist.ProcessGroup,
    lag: int,
    post: Callable[[int], Posted],
    check_batch: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Replaces a rank's own decisions in Lightning's loops by joint decisions of all ranks.

    A validation depends on ``should_stop`` too, in ``on_advance_end``. The other places are ends of
    loops, where all ranks meet.

    Args:
        trainer: The trainer, set up to fit; changed until the returned function is called.
        group: A gloo group of all ranks.
        lag: By how many batches one rank can be ahead of another.
        post: Posts a vote behind a batch, together with the vote before the next batch.
        check_batch: Called behind each training batch, ahead of a validation.
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

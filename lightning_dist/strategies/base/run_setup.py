"""A run's setup, in the one order that all strategies share.

Lightning calls :meth:`RunSetup.setup` for each fit, validation, test and prediction. It is final; a
strategy fills in the hooks. Their order:

=========================  =========================================================================
``check_run``              refuses what the strategy cannot train, on all ranks alike
``place_model``            parallelizes the module, and puts its values on this rank's device
(a checkpoint is loaded)   as on a single device, before optimizers and ``on_fit_start``
``connect_loops``          takes part in Lightning's loops where these call no strategy
``print_summary``          describes what was placed
``setup_optimizers``       Lightning's own, while the whole model's structure is in sight
``keep_own_part``          drops what other ranks have, from the optimizers at least
``gradient_clipping``      clips by the norm of the whole model's gradient
``open_session``           opens what the steps need: channels, wrappers, logs
=========================  =========================================================================

``close_session`` undoes all of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.splitting.cut import is_cut
from lightning_dist.engine.splitting.tracing.split import is_traced
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.patch import Undo, replace_method
from lightning_dist.engine.tensors.rng import first_ranks_numbers, random_state_kept
from lightning_dist.strategies.base.callback_order import drain_before_validation, order_callbacks
from lightning_dist.strategies.base.clipping import ClipGradNorm, clip_whole_gradient
from lightning_dist.strategies.base.ending.stopping import stop_training_together
from lightning_dist.strategies.base.lightning_internals import callbacks_of
from lightning_dist.strategies.base.lightning_loaders import resume_early_loader
from lightning_dist.strategies.base.metrics import metrics_of, reduce_metrics_over, warn_of_rates
from lightning_dist.strategies.base.model_checks import (
    check_group_values,
    check_initialised,
    check_no_max_norm,
)
from lightning_dist.strategies.base.saving.checkpointing import LayoutFreeCheckpoints
from lightning_dist.strategies.base.saving.saved_modules import saved_modules_of

Step: TypeAlias = Callable[..., Any]
"""A step of the user's: a method of the module, or a function around one."""
ChangeStep: TypeAlias = Callable[[Step], Step]
"""Wraps a step."""
StepContext: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Creates the context manager that a step of the user's runs in."""
Closure: TypeAlias = Callable[[], Any]
"""Runs a batch, or the optimizer's step around a batch, and returns what that returns."""
_CPU = torch.device("cpu")


class RunSetup(LayoutFreeCheckpoints):
    """Sets runs up; see the module's docstring."""

    _is_laid_out = False
    _is_building = False
    _undo: tuple[Callable[[], object], ...] = ()

    # --- the order ---------------------------------------------------------------------------

    @final
    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Sets a run up, with the module connected. Collective: every rank must call it."""
        self.lay_out_once()
        self.connect_loops(trainer)
        if self.is_fitting:
            self.print_summary()
            with self.whole_structure(_CPU):
                self.setup_optimizers(trainer)
                if not self.has_plain_state:
                    self.name_optimizer_groups()
        self.keep_own_part()
        self.warn_of_part()
        if self.is_fitting:
            clip = self.gradient_clipping(trainer)
            if clip is not None:
                self._undo += (clip_whole_gradient(self.precision_plugin, clip),)
        self.setup_precision_plugin()
        self.open_session(trainer)

    @final
    @override
    def lay_out_once(self) -> None:
        """Places the model, once per run: in the load of a checkpoint, or else in ``setup``."""
        if self._is_laid_out or self._is_building:  # ``configure_model`` may load one, too
            return
        trainer = self.module.trainer
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        check_initialised(self.module)
        self.check_run(trainer)
        if self.is_fitting and self.mesh.data_size > 1:
            reason = "each rank writes those of its own samples, and weights come to differ"
            check_no_max_norm(self.module, reason)
        saved_modules_of(self.module).restore(self.module)
        if not self.has_plain_state:
            self._undo += _log_graphs_of_whole(trainer)
        self.place_model(trainer)
        self._is_laid_out = True

    @override
    def begin_run(self) -> None:
        super().begin_run()
        self._is_laid_out = False

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Runs ``configure_model`` with rank 0's random numbers, whatever it keeps of them."""
        self._is_building = True
        try:
            with first_ranks_numbers(self.world_group, self.root_device):
                yield
        finally:
            self._is_building = False

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains."""
        return self.module.trainer.state.fn == TrainerFn.FITTING

    # --- hooks -------------------------------------------------------------------------------

    def check_run(self, trainer: pl.Trainer) -> None:
        """Raises ``ValueError`` if this strategy cannot run the module so. Collective."""

    @abstractmethod
    def place_model(self, trainer: pl.Trainer) -> None:
        """Parallelizes the module, and moves this rank's part to its device. Collective."""

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    def connect_loops(self, trainer: pl.Trainer) -> None:
        """Takes part in Lightning's loops where these call no strategy, until the session ends."""
        if self.mesh.data_size < self.mesh.world_size:  # other ranks see the same samples
            callbacks = callbacks_of(trainer)
            warn_of_rates(callbacks, self.mesh.world_size, self.mesh.data_size)
            others = metrics_of(callbacks)
            self._undo += (reduce_metrics_over(others, self.data_group),)
        self.guard.connect_signals(self.before_reading, self.finish_save)
        if not self.is_fitting:
            return
        self._undo += (
            resume_early_loader(trainer),
            drain_before_validation(self.module, self.before_validation),
            order_callbacks(
                trainer,
                show_whole_model=self.summarised_module,
                on_train_epoch_end=self.end_epoch,
                on_train_end=self.end_training,
                on_train_epoch_start=self.begin_epoch,
            ),
            stop_training_together(
                trainer,
                self.joint_decision,
                post=self.guard.stop.post,
                end_batch=self.end_batch,
            ),
        )

    def print_summary(self) -> None:
        """Prints how the model is placed, on rank 0. Collective: every rank must call it."""

    def whole_structure(self, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Returns a context manager with the whole model's structure, as on a single device.

        Parameters that other ranks have are on a device; None takes the meta device.
        """
        split = self.split
        return nullcontext() if split is None else split.whole(device)

    @override
    def annotate(self, exception: BaseException) -> None:
        super().annotate(exception)
        placed = () if self.split is None else self.split.layers.placed
        missing = set[str]().union(*(each.remote_names for each in placed))
        if missing and "NoneType" in str(exception):
            exception.add_note(
                f"Outside of steps, {sorted(missing)} are None on this rank: they are on the first"
                " or the last stage, where they are used. Log or use them in the step."
            )

    def keep_own_part(self) -> None:
        """Drops other ranks' parameters from the optimizers, which are none in evaluations."""

    def gradient_clipping(self, trainer: pl.Trainer) -> ClipGradNorm | None:
        """Returns the function that clips gradients; None if each rank has the whole gradient."""
        return None

    @abstractmethod
    def open_session(self, trainer: pl.Trainer) -> None:
        """Opens what the steps of the run need. Collective: every rank must call it."""

    @override
    def close_session(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo = ()

    # --- steps -------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self.evaluate(self.module.validation_step, context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self.evaluate(self.module.test_step, context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self.evaluate(self.module.predict_step, context, *args, **kwargs)

    def evaluate(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        """Runs a step of the module without gradients."""
        with context():
            return step(*args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Closure,
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.mesh.pp > 1 and self.module.trainer.checkpoint_callbacks:
            self.check_group_names()  # now, not when hours of training are to be saved
        apply = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        return self.update(optimizer, closure, apply)

    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        """Updates: calls ``apply``, the optimizer's step around the batch, or ``closure`` alone."""
        return apply()

    # --- hooks in Lightning's loops, on all ranks --------------------------------------------

    @abstractmethod
    def drain(self) -> None:
        """Brings all ranks to the state after the same update.

        Collective: every rank must call it. Validation, checkpoints and the end of training call it
        by themselves.
        """

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()
        return super().lightning_module_state_dict()

    def before_reading(self) -> None:
        """Called before each training batch is read."""

    def begin_epoch(self) -> None:
        """Called before the callbacks' ``on_train_epoch_start``."""

    def end_batch(self) -> None:
        """Called after each training batch, before a validation."""

    def before_validation(self) -> None:
        """Called before each validation inside of ``fit``."""
        self.drain()
        self.check_optimizers_agree()

    def end_epoch(self) -> None:
        """Called before the callbacks' ``on_train_epoch_end``."""

    def end_training(self) -> None:
        """Called before the callbacks' ``on_train_end``."""
        self.drain()
        self.check_optimizers_agree()
        asked = gather_objects(self.guard.stop.requested, self.world_group)
        self.guard.obey(max(asked))  # for what came behind the last batch boundary

    def check_optimizers_agree(self) -> None:
        """Checks that optimizers do alike on all ranks. Collective: every rank must call it."""
        if self.is_running and not self.has_plain_state:
            check_group_values(self.optimizers, self.world_group)

    @contextmanager
    def summarised_module(self) -> Iterator[None]:
        """Shows the whole model to the callbacks' ``on_fit_start``."""
        # Only a step can run the parts of all ranks, and an example's forward is none.
        example, self.module.example_input_array = self.module.example_input_array, None
        try:
            with self.whole_structure():
                yield
        finally:
            self.module.example_input_array = example


def _log_graphs_of_whole(trainer: pl.Trainer) -> tuple[Undo, ...]:
    """Logs the model's graph, as ``TensorBoardLogger(log_graph=True)`` does, while it is whole.

    Lightning asks loggers behind the strategy's setup, on rank 0 alone, which cannot run a part or
    shards. Its own call is left out until the returned functions are called. A module without
    values, whose construction is deferred, has no graph to run. Nor has one that an earlier run has
    left in parts.
    """
    module = trainer.lightning_module
    tensors = (*module.parameters(), *module.buffers())
    has_values = not any(tensor.is_meta or is_dtensor(tensor) for tensor in tensors)
    is_whole = not (is_cut(module) or is_traced(module))
    if has_values and is_whole and trainer.is_global_zero and trainer.enable_autolog_hparams:
        with random_state_kept(_CPU):  # ranks draw alike
            for logger in trainer.loggers:
                logger.log_graph(module)
    return tuple(
        replace_method(logger, "log_graph", lambda *_, **__: None) for logger in trainer.loggers
    )

"""Find the arguments that a run's first step calls a module with.

The user's own step runs on the first batch as far as to that call. A step may run collectives, so
it runs on all ranks: the first rank reads the batch and sends it to the others. The run has no
effects: logged values, counts and random draws are discarded, and the batch will come again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.precision.casts import as_in_step
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.splitting.tracing.example import Arguments, CallExample, watch_call
from lightning_dist.engine.tensors.module_state import state_kept
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.engine.tensors.tree import map_tensors, own_copy
from lightning_dist.strategies.base import lightning_loaders
from lightning_dist.strategies.base.loaders.first_batch import BegunLoaders, read_first_batch
from lightning_dist.strategies.base.run_setup import RunSetup
from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCalls

_STEPS: dict[TrainerFn | None, tuple[str, str]] = {
    TrainerFn.FITTING: ("training_step", "train_step_context"),
    TrainerFn.VALIDATING: ("validation_step", "val_step_context"),
    TrainerFn.TESTING: ("test_step", "test_step_context"),
    TrainerFn.PREDICTING: ("predict_step", "predict_step_context"),
}
_SET_AN_EXAMPLE = (
    " Set `self.example_input_array` in the LightningModule: a tensor, a tuple of positional"
    " arguments or a dict of named ones, like a small batch, in shape and dtype."
)


class TracesModels(RunSetup):
    """Base of the strategies that trace a model by its call in the first batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._begun = BegunLoaders()

    def example_of_call(self, trainer: pl.Trainer, half: HalfPrecision | None) -> CallExample:
        """Returns the sources of an example call, should the module have to be traced."""
        return CallExample(
            self.module.example_input_array,
            lambda: is_overridden("forward", self.module),
            partial(first_call, trainer, half, self._begun),
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return super().process_dataloader(self._begun.resume(dataloader))


def first_call(
    trainer: pl.Trainer,
    half: HalfPrecision | None,
    begun: BegunLoaders,
    traced: nn.Module,
    path: str,
) -> Arguments:
    """Returns the arguments of a module's call in the run's first step, equal on all ranks.

    Collective: every rank must call it.

    Raises:
        ValueError: There is no batch, or the step does not reach the call.
    """
    module, cpu = trainer.lightning_module, torch.device("cpu")
    name, context = _STEPS[trainer.state.fn]
    with random_state_kept(module.device), state_kept(module):
        purpose = f"layers='trace' reads the first batch to see what {path!r} is called with"
        read = share_first_batch(trainer, begun, purpose)
        if read is None:
            raise ValueError(
                "layers='trace' needs an example of what the traced module is called with, and"
                f" this run has no first batch to show it.{_SET_AN_EXAMPLE}"
            )
        step = getattr(module, name)
        in_step = getattr(trainer.precision_plugin, context)()
        casts = nullcontext() if half is None else as_in_step(module, half)
        grad = torch.enable_grad() if name == "training_step" else torch.no_grad()
        try:
            batch = lightning_loaders.to_step(trainer, read[0], module.device)
            with watch_call(traced) as seen, ahead_of_run(module), casts, in_step, grad:
                step(*step_arguments(step, batch, read[1]))
        except Exception as error:
            raise ValueError(
                f"layers='trace' ran `{name}` on the first batch, ahead of the run, to see what"
                f" {path!r} is called with, and it raised {type(error).__name__}: {error}. It may"
                f" need what a later hook makes.{_SET_AN_EXAMPLE}"
            ) from error
        if not seen:
            missed = repr(path) if path else "`self(...)`"
            raise ValueError(
                f"`{name}` did not call {missed}, which layers='trace' is to cut. Call it once in"
                " each step, or name the module that it calls with layers='trace:path'."
            )
    return _copied(_share(trainer, _copied(seen[0], cpu)), module.device)


def _share(trainer: pl.Trainer, value: Any) -> Any:
    return value if trainer.world_size == 1 else trainer.strategy.broadcast(value)


def share_first_batch(
    trainer: pl.Trainer, begun: BegunLoaders, purpose: str
) -> tuple[Any, int] | None:
    """Reads the first batch on rank 0, and broadcasts it to all ranks. Collective.

    Returns:
        A copy of the collated batch, and the number of loaders; None without a batch.

    Raises:
        ValueError: Reading failed on rank 0.
    """
    read: tuple[Any, int] | None = None
    problem = ""
    if trainer.is_global_zero:
        try:
            read = read_first_batch(trainer, begun)
            if read is not None:  # a step may write into what the run will read again
                read = own_copy(read[0]), read[1]
        except Exception as error:
            if trainer.world_size == 1:
                raise
            problem = f"{type(error).__name__}: {error}"
    else:
        lightning_loaders.request_loaders(trainer)  # all ranks call a hook, or none
    read, problem = _share(trainer, (read, problem))
    if problem:
        raise ValueError(f"{purpose}, and reading it failed: {problem}")
    return read


@contextmanager
def ahead_of_run(module: pl.LightningModule) -> Iterator[None]:
    """Returns a context manager for steps of a module ahead of its run.

    They log and print nothing. A step that asks for optimizers or schedulers, to log a rate say,
    gets some that are not the run's.
    """
    with ExitStack() as undo:
        trainer = None
        with suppress(RuntimeError):  # what Lightning raises if there is none
            trainer = module.trainer
        if trainer is not None:
            undo.enter_context(RankZeroCalls(module, is_source=False).in_step())
            if trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization:
                undo.enter_context(_optimizers_on_demand(trainer, module))
        for name in ("log", "log_dict"):
            undo.callback(replace_method(module, name, lambda *_, **__: None))
        yield


@contextmanager
def _optimizers_on_demand(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    strategy, made = trainer.strategy, list[bool]()

    def asked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not made:
            Strategy.setup_optimizers(strategy, trainer)
            made.append(True)
        return original(*args, **kwargs)

    with ExitStack() as undo:
        for name in ("optimizers", "lr_schedulers"):
            method = partial(asked, getattr(module, name))
            undo.callback(replace_method(module, name, method))
        try:
            yield
        finally:
            if made:
                strategy.optimizers, strategy.lr_scheduler_configs = [], []


def step_arguments(step: Callable[..., Any], batch: Any, num_loaders: int) -> list[Any]:
    """Returns the arguments that Lightning calls a step with."""
    arguments = [batch]
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        arguments.append(0)
    if num_loaders > 1 and "dataloader_idx" in inspect.signature(step).parameters:
        arguments.append(0)
    return arguments


def _copied(arguments: Arguments, device: torch.device) -> Arguments:
    def copied(leaf: Tensor) -> Tensor:
        return leaf.detach().to(device, copy=True)

    args, kwargs = map_tensors(copied, arguments)
    return args, kwargs

"""Refuse trainers and modules that a pipeline cannot run, before any rank waits for another.

What is checked of the trainer and the module is the same on all ranks, so all ranks raise the same
``ValueError``. The strategy's own arguments check themselves, in :mod:`.splitting.config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.splitting.config import PipelineConfig, find_batch_statistics
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.base.lightning_internals import callbacks_of
from lightning_dist.strategies.base.model_checks import (
    check_callbacks,
    check_finetuning,
    check_no_max_norm,
)
from lightning_dist.strategies.base.saving.part_warning import without_warning


def find_statistics_of_all(module: pl.LightningModule, group: dist.ProcessGroup) -> tuple[str, ...]:
    """Lists the modules of all stages that compute statistics of a training batch.

    Collective: every rank must call it. Evaluations list the modules too, in whatever mode they
    are: a batch is left whole in all runs alike.
    """
    is_fitting = module.trainer.state.fn == TrainerFn.FITTING
    own = find_batch_statistics(module, in_any_mode=not is_fitting)
    return tuple(dict.fromkeys(n for names in gather_objects(own, group) for n in names))


def check_trainer(
    trainer: pl.Trainer, module: pl.LightningModule, config: PipelineConfig, num_stages: int
) -> None:
    """Checks the trainer and the module before training.

    Raises:
        ValueError: The trainer or the module asks for something that a pipeline cannot do.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "`automatic_optimization=False`: a pipeline runs the backward itself, so it cannot"
            " leave it to `training_step`. Use automatic optimization."
        )
    if trainer.precision in ("16-mixed", "transformer-engine", "transformer-engine-float16"):
        raise ValueError(
            f"precision={trainer.precision!r} scales the loss of an undivided batch, which a"
            " pipeline does not have. Use precision='bf16-mixed'."
        )
    reason = "an earlier micro-batch has computed elsewhere with the longer ones"
    if config.asynchronous:
        reason = f"schedule={config.schedule!r} keeps other versions of it, with the longer ones"
    check_no_max_norm(module, reason, only_shared=not config.asynchronous)
    if num_stages > 1 or config.asynchronous:
        check_callbacks(trainer)
        check_finetuning(trainer)
    if not config.asynchronous:
        return
    accumulates = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks_of(trainer))
    if trainer.accumulate_grad_batches != 1 or accumulates:
        given = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        asked = GradientAccumulationScheduler.__name__ if accumulates else given
        raise ValueError(
            f"{asked} does not go with schedule={config.schedule!r}, which updates the weights"
            " after each batch. Use larger batches, or schedule='1f1b'."
        )
    if not config.family.update_rule.is_joint and clips_by_norm(trainer, module):
        asked = f"gradient_clip_val={trainer.gradient_clip_val}"
        if is_overridden("configure_gradient_clipping", module):
            asked = "A `clip_gradients` in `configure_gradient_clipping`"
        rank_zero_warn(
            f"{asked} with schedule={config.schedule!r} clips by the norm of each stage's own"
            " gradients, for the stages' updates belong to different batches."
            " schedule='pipedream_2bw' clips by the norm of the whole gradient."
        )


def clips_by_norm(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Returns whether gradients are clipped by their norm, as far as that is known before a run."""
    asked = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
    return asked or is_overridden("configure_gradient_clipping", module)


def check_saved_names(module: pl.LightningModule, split: PipelineSplit) -> None:
    """Checks that a module saves its layers under their names, by which stages share them out.

    Raises:
        ValueError: A ``state_dict`` of the module's own gives them other names.
    """
    has_own = type(module).state_dict is not nn.Module.state_dict
    if not has_own or split.layers.traced_module is not None:
        return  # the names of a trace are the module's
    parts = (part.module for part in split.layers.parts())
    tensors = (t for part in parts for t in (*part.parameters(), *part.buffers()))
    own = {_place(tensor) for tensor in tensors} - {0}
    with without_warning(module):
        saved = split.state_dict(module)
    others = (name for name in saved if not split.is_in_a_layer(name))
    if any(isinstance(saved[name], Tensor) and _place(saved[name]) in own for name in others):
        raise ValueError(
            f"`state_dict` of {type(module).__name__} gives layers other names than the module has"
            " for them. Stages tell by names which of them saves a layer, so its weights would be"
            " missing in checkpoints. Leave the names as they are, and change them in a merged"
            " checkpoint (`python -m lightning_dist merge`)."
        )


def _place(tensor: Tensor) -> int:
    """Returns where a tensor's own elements are in memory; 0 if it has none."""
    own = local_part(tensor.detach())
    return 0 if own.is_meta else own.data_ptr()


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Turns Lightning's refusal of several optimizers into the ``ValueError`` of this package.

    Raises:
        ValueError: ``configure_optimizers`` returned several optimizers.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ValueError(
            "`configure_optimizers` returned several optimizers, but a pipeline has one per rank."
            " Return one, with parameter groups where parameters need different settings."
        ) from None


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a step's arguments, the batch first.

    Raises:
        ValueError: The step takes the loader's iterator.
    """
    arguments = (*args, *kwargs.values())
    if arguments and isinstance(arguments[0], Iterator):
        raise ValueError(
            "`training_step(self, dataloader_iter)` fetches its own batches, which a pipeline must"
            " cut first. Use `training_step(self, batch, batch_idx)`."
        )
    return arguments

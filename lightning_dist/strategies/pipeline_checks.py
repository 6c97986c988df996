"""Refuse what a pipeline cannot do, before any rank waits for another.

Each check reads the arguments, the trainer and the module, which are the same on all ranks, so all
ranks raise the same ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.pipeline.schedules import SCHEDULE_NAMES
from lightning_dist.strategies.lightning_private import callbacks_of


def check_arguments(
    num_stages: int | str,
    schedule: str,
    num_microbatches: int | str,
    partition: str | Sequence[int],
    weight_versions: str,
) -> None:
    """Checks the strategy's arguments on their own.

    Args:
        num_stages: As given to the strategy.
        schedule: As given to the strategy.
        num_microbatches: As given to the strategy.
        partition: As given to the strategy.
        weight_versions: As given to the strategy.

    Raises:
        ValueError: One of them is unknown, too small, or does not go with another.
    """
    if schedule not in SCHEDULE_NAMES:
        raise ValueError(f"schedule={schedule!r} is unknown; use one of {list(SCHEDULE_NAMES)}.")
    if weight_versions not in ("stash", "none"):
        raise ValueError(f"weight_versions={weight_versions!r} is unknown; use 'stash' or 'none'.")
    _check_count("num_stages", num_stages)
    _check_count("num_microbatches", num_microbatches)
    if schedule == "pipedream" and num_microbatches not in ("auto", 1):
        raise ValueError(
            f"num_microbatches={num_microbatches} does not go with schedule='pipedream', which"
            " takes each Lightning batch as one micro-batch. Leave it at 'auto' and use smaller"
            " batches, or use schedule='1f1b'."
        )
    if isinstance(partition, str) and partition not in ("parameters", "uniform"):
        raise ValueError(
            f"partition={partition!r} is unknown; use 'parameters', 'uniform' or the layers per"
            " stage, like [3, 3]."
        )


def _check_count(name: str, value: int | str) -> None:
    if value != "auto" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} must be 'auto' or at least 1.")


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, asynchronous: bool) -> None:
    """Checks the trainer and the module before training.

    Args:
        trainer: The trainer.
        module: The user's module.
        asynchronous: Whether batches overlap.

    Raises:
        ValueError: They ask for what a pipeline cannot do.
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
    if not asynchronous:
        return
    accumulates = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks_of(trainer))
    if trainer.accumulate_grad_batches != 1 or accumulates:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not go with"
            " schedule='pipedream', which updates the weights after each batch. Use larger batches,"
            " or schedule='1f1b'."
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        rank_zero_warn(
            f"gradient_clip_val={trainer.gradient_clip_val} with schedule='pipedream' clips by the"
            " norm of each stage's own gradients: the stages' updates belong to different batches,"
            " and a norm over all stages would make them wait for each other."
        )


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Turns Lightning's refusal of several optimizers into the ``ValueError`` of this package.

    Yields:
        Nothing.

    Raises:
        ValueError: ``configure_optimizers`` returned several.
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


def arguments_of_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Gives a step's arguments, the batch first.

    Args:
        args: As Lightning passes them.
        kwargs: As Lightning passes them.

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

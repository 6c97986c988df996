"""Modules that compute with the statistics of a batch, which micro-batches change.

BatchNorm in training mode normalises a sample by all samples of its call. A micro-batch has fewer
samples, so a batch in micro-batches trains another model than the same batch on one device.
If the schedule allows it, ``num_microbatches="auto"`` therefore leaves such batches whole.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all of them has no public name

from lightning_dist.engine.splitting.config import PipelineConfig


def find_batch_statistics(module: nn.Module) -> tuple[str, ...]:
    """Lists the modules that would compute statistics of a training batch, with their classes.

    Args:
        module: The whole model, in the mode in which it trains.
    """
    return tuple(
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.training
    )


def with_whole_batches(config: PipelineConfig, num_ranks: int) -> PipelineConfig:
    """Returns the configuration with one micro-batch, if it says ``"auto"`` and that is possible.

    Args:
        config: The user's configuration.
        num_ranks: Ranks of the pipeline.
    """
    if config.num_microbatches != "auto":
        return config
    whole = replace(config, num_microbatches=1)
    try:
        whole.rank_of_stage(num_ranks)
    except ValueError:  # the schedule needs more
        return config
    return whole

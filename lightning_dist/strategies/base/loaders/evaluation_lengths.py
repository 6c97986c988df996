"""Ranks that compute each forward together have as many batches to evaluate.

A rank with more would wait in its next forward for others that are past their last batch. Replicas
that only train together may differ: evaluation ties them by their metrics alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dist.engine.tensors.replaced_method import replace_method


def check_evaluation_lengths(
    trainer: pl.Trainer, tied: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Callable[[], None]:
    """Compares the ranks' evaluation loaders whenever they have been set up.

    ``setup_data`` is the last place where all ranks come by: a rank without any batch skips the
    hooks. The check raises a ``ValueError`` there, before the sanity check too.

    Args:
        trainer: Set up to fit, or to evaluate; changed until the returned function is called.
        tied: The ranks that compute a forward together, each in one of the sequences.
        group: A gloo group of all ranks.

    Returns:
        Undoes the change.
    """
    fn = trainer.state.fn
    if fn == TrainerFn.FITTING:
        loop, verb = trainer.fit_loop.epoch_loop.val_loop, "validate"
    else:
        assert fn is not None
        loop, verb = getattr(trainer, f"{fn.value}_loop"), fn.value
    short = "val" if verb == "validate" else verb
    set_up = loop.setup_data

    def set_up_and_check() -> None:
        set_up()
        lengths = getattr(trainer, f"num_{short}_batches")  # not cut by the sanity check
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, list(lengths), group=group)
        if any(everyone[rank] != everyone[ranks[0]] for ranks in tied for rank in ranks):
            shown = [of[0] if len(of) == 1 else of for of in everyone]
            raise ValueError(
                f"The ranks have {shown} batches to {verb}, and compute each forward together: the"
                " ones with more would wait for the others for ever. Use a sampler that shares the"
                f" samples out evenly, like Lightning's own, or `limit_{short}_batches`."
            )

    return replace_method(loop, "setup_data", set_up_and_check)

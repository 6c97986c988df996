"""Checks that the evaluation loaders of ranks that work together have equally many batches.

A rank with more batches would wait in its next forward for others that are past their last batch.
Replicas may differ: evaluation ties them by their metrics alone, unless a step combines a value of
all replicas. Known lengths are compared when loaders have been set up. Of a loader of unknown
length Lightning reads one batch ahead. So ranks that are tied tell each other before each batch
whether it is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_dist.engine.common.gather import gather_objects
from lightning_dist.engine.tensors.patch import Undo, replace_method
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.lightning_internals import hook_of


class _Left(IntEnum):
    """What a rank has left to evaluate."""

    NONE = 0
    LAST = 1
    MORE = 2


class EvaluationLengths:
    """Checks on one rank that ranks which are tied evaluate as many batches.

    Args:
        trainer: The trainer, set up to fit or to evaluate.
        everyone: Returns a gloo group of all ranks.
        tied: The ranks that compute a forward together, each in one of the sequences.
        tied_group: A gloo group of those that this rank computes with; None if it is alone.
        runs_whole_steps: Whether each rank runs the steps of the module to their end.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        everyone: Callable[[], dist.ProcessGroup],
        tied: Sequence[Sequence[int]],
        tied_group: dist.ProcessGroup | None,
        *,
        runs_whole_steps: bool,
    ) -> None:
        fn = trainer.state.fn
        assert fn is not None
        self._trainer = trainer
        self._everyone = everyone
        self._tied = tied
        self._tied_group = tied_group
        self._runs_whole_steps = runs_whole_steps
        is_fitting = fn == TrainerFn.FITTING
        self._verb = "validate" if is_fitting else fn.value
        own_loop = None if is_fitting else getattr(trainer, f"{fn.value}_loop")
        self._loop = own_loop or trainer.fit_loop.epoch_loop.val_loop
        self._short = "val" if self._verb == "validate" else self._verb
        stage = "validation" if self._verb == "validate" else self._verb
        self._hooks = (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end")
        self._epoch_end = f"on_{stage}_epoch_end"
        self._lengths: list[list[int | float]] = []  # of each rank, by loader
        self._is_unknown = False
        self._telling: dist.ProcessGroup | None = None  # ranks that tell each other
        self._num_begun = 0

    def connect(self) -> Undo:
        """Takes part in Lightning's loop.

        ``setup_data`` is the last call that all ranks make: a rank without any batch skips the
        hooks. So known lengths are compared there, before the sanity check too.
        """
        loop = self._loop
        set_up = loop.setup_data

        def set_up_and_compare() -> None:
            set_up()
            self._compare()

        _, batch_start, _ = self._hooks
        callback = LambdaCallback(
            **{
                batch_start: lambda *_: self._begin_batch(),
                self._epoch_end: lambda *_: self._end_epoch(),
            }
        )
        with ExitStack() as undo:
            undo.callback(replace_method(loop, "setup_data", set_up_and_compare))
            undo.callback(add_first_callback(self._trainer, callback))
            return undo.pop_all().close

    def _compare(self) -> None:
        """Compares the loaders of all ranks. Collective: every rank must call it.

        Raises:
            ValueError: Ranks that compute a forward together have other numbers of batches.
        """
        loaders = getattr(self._trainer, f"{self._short}_dataloaders")
        flattened = [] if loaders is None else CombinedLoader(loaders, "sequential").flattened
        is_unknown = any(sized_len(loader) is None for loader in flattened)
        lengths = list(getattr(self._trainer, f"num_{self._short}_batches"))  # of a whole run
        everyone = gather_objects((lengths, is_unknown), self._everyone())
        self._lengths = [of_rank for of_rank, _ in everyone]
        self._is_unknown = any(unknown for _, unknown in everyone)
        self._telling = self._tied_group if self._is_unknown else None
        self._num_begun = 0
        places = range(len(everyone))
        tied = [[rank for rank in ranks if rank in places] for ranks in self._tied]
        if any(self._lengths[rank] != self._lengths[ranks[0]] for ranks in tied for rank in ranks):
            raise ValueError(
                f"The ranks have {self._shown} batches to {self._verb}, and compute each forward"
                " together: the ones with more would wait for the others for ever. Use a sampler"
                " that shares the samples out evenly, like Lightning's own, or"
                f" `limit_{self._short}_batches`."
            )

    @property
    def _shown(self) -> list[Any]:
        return [of[0] if len(of) == 1 else of for of in self._lengths]

    def combine_in_step(self) -> None:
        """Notes that a value of all ranks is combined; inside of a step that ties them.

        Raises:
            ValueError: The ranks do not have as many batches.
        """
        if hook_of(self._trainer.lightning_module) not in self._hooks:
            return
        if any(of_rank != self._lengths[0] for of_rank in self._lengths):
            raise ValueError(
                f"The ranks have {self._shown} batches to {self._verb}, and combine a value in each"
                " step, as `self.log(..., on_step=True, sync_dist=True)` does: the ones with more"
                " would wait for the others for ever. Combine it at the end of the epoch"
                " (`on_step=False`), use a sampler that shares the samples out evenly, like"
                f" Lightning's own, or `limit_{self._short}_batches`."
            )
        everyone = self._everyone()
        if self._is_unknown and self._runs_whole_steps and self._telling is not everyone:
            self._telling = everyone
            self._tell(self._left)

    @property
    def _left(self) -> _Left:
        return _Left.LAST if self._loop.batch_progress.is_last_batch else _Left.MORE

    def _begin_batch(self) -> None:
        self._num_begun += 1
        self._tell(self._left)

    def _end_epoch(self) -> None:
        if self._num_begun == 0:
            self._tell(_Left.NONE)
        self._num_begun = 0

    def _tell(self, left: _Left) -> None:
        """Tells the others what this rank has left. Collective.

        Raises:
            ValueError: Some loaders end here, and others go on.
        """
        if self._telling is None:
            return
        own = torch.tensor([left], dtype=torch.int32)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._telling))]
        dist.all_gather(everyone, own, group=self._telling)
        numbers = [int(number) for number in everyone]
        if len(set(numbers)) > 1:
            ranks = dist.get_process_group_ranks(self._telling)
            of_ranks = zip(ranks, numbers, strict=True)
            ended = [rank for rank, number in of_ranks if number == min(numbers)]
            count = max(self._num_begun, 1) - (min(numbers) == _Left.NONE)
            raise ValueError(
                f"The loaders of the ranks {ended} (of {ranks}) have ended after {count} batches to"
                f" {self._verb}, and those of the others have not: these would wait for the former"
                f" for ever. Give each rank as many samples, or set `limit_{self._short}_batches`."
            )

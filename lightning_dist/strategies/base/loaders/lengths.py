"""Checks that the loaders of ranks that wait for each other have equally many batches.

A rank with more batches would wait for ever for others that are past their last batch: in training
for their gradients, and in an evaluation where ranks compute a forward together. Evaluating
replicas may differ, for their metrics alone tie them, unless a step combines a value of all
replicas. Known lengths are compared when loaders have been set up. Of a loader of unknown length
Lightning reads one batch ahead. So the ranks tell each other before each batch whether it is the
last, and in training hear of it during the step. They also tell when an epoch ends. A training
loader that ends before its ``__len__`` is found at its end: the rank leaves a note, and checks
whether all others have left one.
"""

from __future__ import annotations

import math
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
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.tensors.patch import Undo, surround_method
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.base.lightning_internals import hook_of
from lightning_dist.strategies.base.lightning_loaders import batches_read


class _Left(IntEnum):
    """What a rank has left."""

    NONE = 0
    LAST = 1
    MORE = 2


class LoaderEnds:
    """Where the loaders of ranks that wait for each other end, if a length is unknown."""

    def __init__(self, verb: str, advice: str) -> None:
        self._verb = verb
        self._advice = advice
        self._telling: dist.ProcessGroup | None = None  # ranks that tell each other
        self._num_begun = 0
        self._pending: tuple[dist.Work, list[Tensor]] | None = None

    def begin_batch(self, *, is_last: bool) -> None:
        """Tells the others whether this batch is the rank's last. Collective, before the step.

        Raises:
            ValueError: Some loaders end here, and others go on.
        """
        self._post_batch(is_last=is_last)
        self._check()

    def _post_batch(self, *, is_last: bool) -> None:
        self._num_begun += 1
        self._post(_Left.LAST if is_last else _Left.MORE)

    def _end_epoch(self) -> None:
        # A loader may end behind a batch that was not its last: with a limit, Lightning reads none
        # ahead.
        self._num_begun += 1
        self._post(_Left.NONE)
        self._check()
        self._num_begun = 0

    def _post(self, left: _Left) -> None:
        if self._telling is None:
            return
        own = torch.tensor([left], dtype=torch.int32)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._telling))]
        work = dist.all_gather(gathered, own, group=self._telling, async_op=True)
        assert work is not None
        self._pending = work, gathered

    def _check(self) -> None:
        if self._telling is None or self._pending is None:
            return
        (work, gathered), self._pending = self._pending, None
        work.wait()
        numbers = [int(number) for number in gathered]
        if len(set(numbers)) > 1:
            ranks = dist.get_process_group_ranks(self._telling)
            of_ranks = zip(ranks, numbers, strict=True)
            ended = [rank for rank, number in of_ranks if number == min(numbers)]
            count = self._num_begun - (min(numbers) == _Left.NONE)
            raise ValueError(
                f"The loaders of the ranks {ended} (of {ranks}) have ended after {count} batches to"
                f" {self._verb}, and those of the others have not: these would wait for the former"
                f" for ever. Give each rank as many samples, or set {self._advice}."
            )


class TrainingLengths(LoaderEnds):
    """Checks on one rank that the training loaders of all ranks end at the same batch."""

    grace_seconds = 10.0  # for others' notes: the ranks have just been at the same batch, or nearly

    def __init__(self, notes: RankNotes, group: dist.ProcessGroup) -> None:
        super().__init__(
            "train on",
            "`limit_train_batches`; or, if the data has a length and DDPStrategy averages"
            " gradients, define `__len__` and pass uneven_inputs=True",
        )
        self._notes = notes
        self._group = group

    def begin_epoch(self, trainer: pl.Trainer, *, is_unknown: bool) -> None:
        """Compares the lengths of the loaders. Collective: every rank must call it.

        Raises:
            ValueError: The numbers of batches differ.
        """
        gathered = gather_objects((trainer.num_training_batches, is_unknown), self._group)
        lengths = [length for length, _ in gathered]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"The ranks have {lengths} training batches, and the ones with more would wait for"
                " the others for ever. Use a sampler that shares the samples out evenly, like"
                " Lightning's own, or `limit_train_batches`, or, where DDPStrategy averages"
                " gradients, pass uneven_inputs=True."
            )
        self._telling = self._group if any(unknown for _, unknown in gathered) else None
        self._num_begun = 0

    @override
    def begin_batch(self, *, is_last: bool) -> None:
        self._post_batch(is_last=is_last)
        if self._num_begun == 1:  # a rank without a batch comes to no end of one
            self._check()

    def end_batch(self) -> None:
        """Checks what :meth:`begin_batch` has told, which has come during the step.

        Raises:
            ValueError: Some loaders end here, and others go on.
        """
        self._check()

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Checks how a training epoch has ended, before this rank waits for others.

        Raises:
            ValueError: This rank's loader has ended early, and another one's has not.
        """
        self._end_epoch()
        num_read, length, has_ended = batches_read(trainer)
        if length is None or num_read >= length or not has_ended:
            return
        epoch = trainer.current_epoch
        self._notes.leave(epoch, [num_read])
        if not self._notes.await_common(epoch, [num_read], self.grace_seconds):
            raise ValueError(
                f"The training loader of rank {dist.get_rank()} says that it has {length} batches"
                f" and has ended after {num_read}, and other ranks' have not: these would wait for"
                " the gradients of the former for ever. Make `__len__` tell the number of batches,"
                " or leave it out."
            )


class EvaluationLengths(LoaderEnds):
    """Checks on one rank that ranks which are tied evaluate as many batches.

    Each sequence of ``tied`` has ranks that compute a forward together, and ``tied_group`` those of
    this rank, unless it is alone. ``world_group`` returns a group of all ranks that are not lost.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        world_group: Callable[[], dist.ProcessGroup],
        tied: Sequence[Sequence[int]],
        tied_group: dist.ProcessGroup | None,
        *,
        runs_whole_steps: bool,
    ) -> None:
        fn = trainer.state.fn
        assert fn is not None
        is_fitting = fn == TrainerFn.FITTING
        verb = "validate" if is_fitting else fn.value
        short, stage = ("val", "validation") if verb == "validate" else (verb, verb)
        super().__init__(verb, f"`limit_{short}_batches`")
        self._trainer = trainer
        self._world_group = world_group
        self._tied = tied
        self._tied_group = tied_group
        self._runs_whole_steps = runs_whole_steps
        own_loop = None if is_fitting else getattr(trainer, f"{fn.value}_loop")
        self._loop = own_loop or trainer.fit_loop.epoch_loop.val_loop
        self._short, self._stage = short, stage
        self._lengths: list[list[int | float]] = []  # of each rank, by loader
        self._is_unknown = False

    def connect(self) -> Undo:
        """Takes part in Lightning's loop.

        ``setup_data`` is the last call that all ranks make: a rank without any batch skips the
        hooks. So known lengths are compared there, before the sanity check too.
        """
        callback = LambdaCallback(
            **{
                f"on_{self._stage}_batch_start": lambda *_: self.begin_batch(is_last=self._is_last),
                f"on_{self._stage}_epoch_end": lambda *_: self._end_epoch(),
            }
        )
        with ExitStack() as undo:
            undo.callback(surround_method(self._loop, "setup_data", after=self._compare))
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
        gathered = gather_objects((lengths, is_unknown), self._world_group())
        self._lengths = [of_rank for of_rank, _ in gathered]
        self._is_unknown = any(unknown for _, unknown in gathered)
        self._telling = self._tied_group if self._is_unknown else None
        self._num_begun = 0
        places = range(len(gathered))
        tied = [[rank for rank in ranks if rank in places] for ranks in self._tied]
        if any(self._lengths[rank] != self._lengths[ranks[0]] for ranks in tied for rank in ranks):
            raise self._error("compute each forward together", "Use")

    def all_have(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Returns whether the lengths are known and all ranks have a batch."""
        return all(batch_idx < of_rank[dataloader_idx] < math.inf for of_rank in self._lengths)

    def combine_in_step(self) -> None:
        """Notes that a value of all ranks is combined; inside of a step that ties them.

        Raises:
            ValueError: The ranks do not have as many batches.
        """
        stage, hook = self._stage, hook_of(self._trainer.lightning_module)
        if hook not in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
            return
        if any(of_rank != self._lengths[0] for of_rank in self._lengths):
            raise self._error(
                "combine a value in each step, as `self.log(..., on_step=True, sync_dist=True)`"
                " does",
                "Combine it at the end of the epoch (`on_step=False`), use",
            )
        world = self._world_group()
        if self._is_unknown and self._runs_whole_steps and self._telling is not world:
            self._telling = world
            self._post(_Left.LAST if self._is_last else _Left.MORE)
            self._check()

    def _error(self, tie: str, advice: str) -> ValueError:
        shown: list[Any] = [of[0] if len(of) == 1 else of for of in self._lengths]
        return ValueError(
            f"The ranks have {shown} batches to {self._verb}, and {tie}: the ones with more would"
            f" wait for the others for ever. {advice} a sampler that shares the samples out evenly,"
            f" like torch's DistributedSampler, or {self._advice}."
        )

    @property
    def _is_last(self) -> bool:
        return self._loop.batch_progress.is_last_batch

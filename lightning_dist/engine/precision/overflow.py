"""Whether a step is left out because gradients have overflowed, as all ranks see it.

Each rank looks at the gradients that it has; if one of them left the step out and another did not,
their weights and their loss scales would part. What they can know of each other depends on when
they update:

===========================  ======================================================================
class                      a step is left out where
===========================  ======================================================================
:class:`LocalOverflow`       its gradients are not finite; for one process
:class:`AllReducedOverflow`  those of any rank are not; for updates together; one number is reduced
:class:`AsyncOverflow`       likewise, for late updates; reduced while the next batch computes
:class:`PerStageOverflow`    those of the *stage* are not: when an early stage finds out, the later
                             ones have updated for that batch long ago. The loss scale still follows
                             what any stage has found, some batches later and alike everywhere
===========================  ======================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import local_part


class Overflow(Protocol):
    """Decides which steps are left out, and tells how they went."""

    def decide(self, gradients: Iterable[Tensor]) -> bool:
        """Tells whether a step is left out; each rank calls it for each of its steps.

        Args:
            gradients: Of this rank, complete.
        """

    def outcomes(self) -> Iterator[bool]:
        """Tells of the steps that are known everywhere and were not told before, in their order.

        Yields:
            Whether one has overflowed.
        """


class LocalOverflow:
    """One process, or several that have the same gradients."""

    def __init__(self) -> None:
        self._decided: deque[bool] = deque()

    def decide(self, gradients: Iterable[Tensor]) -> bool:
        """Looks; see :class:`Overflow`."""
        self._decided.append(self._look(gradients))
        return self._decided[-1]

    def outcomes(self) -> Iterator[bool]:
        """Tells of what was decided; see :class:`Overflow`."""
        while self._decided:
            yield self._decided.popleft()

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        return not are_finite(gradients)


class AllReducedOverflow(LocalOverflow):
    """All ranks update together.

    Args:
        group: All of them; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        found = _vote(gradients)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())


class AsyncOverflow(LocalOverflow):
    """Gradients are complete some micro-batches before their update is due.

    Args:
        group: All ranks, for nothing else; takes CPU tensors.
        due: Gives the update that is being decided, counted since the last drain.
    """

    def __init__(self, group: dist.ProcessGroup, due: Callable[[], int]) -> None:
        super().__init__()
        self._group = group
        self._due = due
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Hands over what this rank has found; returns at once.

        Args:
            update: Which, counted since the last drain.
            gradients: Of this rank, complete.
        """
        self._pending[update] = _post(_vote(gradients), self._group)

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        work, found = self._pending.pop(self._due())
        work.wait()
        return bool(found.item())


@dataclass(frozen=True, slots=True)
class _Posted:
    batch: int
    work: dist.Work
    found: Tensor


class Progress(Protocol):
    """How far an asynchronous pipeline has come on this rank.

    Attributes:
        num_batches: Batches that this rank has begun.
        batches_since_drain: Those of them since the last drain.
        gradients_of_batch: The batch whose gradients are at hand.
        lag: By how many batches an update can be late.
    """

    @property
    def num_batches(self) -> int: ...  # noqa: D102

    @property
    def batches_since_drain(self) -> int: ...  # noqa: D102

    @property
    def gradients_of_batch(self) -> int: ...  # noqa: D102

    @property
    def lag(self) -> int: ...  # noqa: D102


class PerStageOverflow:
    """Each stage updates for a batch at another time than the others.

    Args:
        group: All ranks, for nothing else; takes CPU tensors.
        pipeline: This rank's stages at work.
    """

    def __init__(self, group: dist.ProcessGroup, pipeline: Callable[[], Progress]) -> None:
        self._group = group
        self._pipeline = pipeline
        self._posted: deque[_Posted] = deque()

    def decide(self, gradients: Iterable[Tensor]) -> bool:
        """Looks at this stage; see :class:`Overflow`."""
        found = _vote(gradients)
        decided = bool(found.item())
        work, found = _post(found, self._group)
        self._posted.append(_Posted(self._pipeline().gradients_of_batch, work, found))
        return decided

    def outcomes(self) -> Iterator[bool]:
        """Tells of the batches for which all stages have updated; see :class:`Overflow`."""
        while self._posted and self._is_everywhere(self._posted[0].batch):
            posted = self._posted.popleft()
            posted.work.wait()
            yield bool(posted.found.item())

    def _is_everywhere(self, batch: int) -> bool:
        """Whether each rank says so before it begins the same batch, and none has to wait."""
        pipeline = self._pipeline()
        first_since_drain = pipeline.num_batches - pipeline.batches_since_drain
        return batch < first_since_drain or batch + pipeline.lag + 1 < pipeline.num_batches


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Tells whether all elements are finite.

    Args:
        gradients: Of shards, this rank's part is looked at.
    """
    votes = [local_part(gradient).isfinite().all() for gradient in gradients]
    return not votes or bool(torch.stack(votes).all().item())


def _vote(gradients: Iterable[Tensor]) -> Tensor:
    return torch.tensor(int(not are_finite(gradients)), dtype=torch.int32)


def _post(found: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
    shared = found.clone()
    work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    return work, shared

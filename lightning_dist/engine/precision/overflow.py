"""The decision to skip a step whose gradients have overflowed, made alike on all ranks.

Each rank sees its own gradients only. If one rank skipped a step and another did not, their weights
and loss scales would differ. How the ranks can agree depends on when they update:

===========================  ======================================================================
class                        a step is skipped if
===========================  ======================================================================
:class:`Overflow`            this process has a gradient that is not finite
:class:`AllReducedOverflow`  any rank has one; for updates together; one number is all-reduced
:class:`AsyncOverflow`       any rank has one; for late updates; all-reduced during the next batch
:class:`PerStageOverflow`    the *stage* has one: when an early stage detects it, later stages have
                             updated for that batch long ago. The loss scale still follows the
                             overflows of all stages, some batches later and alike everywhere
===========================  ======================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.tensors.dtensor import local_part


class Overflow:
    """Decides which steps are skipped; by itself for one process, or several of equal gradients."""

    def __init__(self) -> None:
        self._decided: deque[bool] = deque()

    def decide(self, gradients: Iterable[Tensor]) -> bool:
        """Returns whether a step is skipped. Collective: every rank must call it for each step.

        Args:
            gradients: This rank's complete gradients.
        """
        self._decided.append(self._look(gradients))
        return self._decided[-1]

    def outcomes(self) -> Iterator[bool]:
        """Yields whether steps overflowed, of those decided on all ranks and not yet reported."""
        while self._decided:
            yield self._decided.popleft()

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        return not are_finite(gradients)


class AllReducedOverflow(Overflow):
    """Decides for the ranks of a group, which update together."""

    def __init__(self, group: DeviceGroup) -> None:
        super().__init__()
        self._group = group

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        found = _vote(gradients, self._group.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group.group)
        return bool(found.item())


class AsyncOverflow(Overflow):
    """Decides for gradients that are complete some micro-batches before their update is due.

    Args:
        group: Group of all ranks, for no other use.
        due: Returns the index of the update to decide, counted since the last drain.
    """

    def __init__(self, group: DeviceGroup, due: Callable[[], int]) -> None:
        super().__init__()
        self._group = group
        self._due = due
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Starts the all-reduce of this rank's vote; does not wait for other ranks."""
        self._pending[update] = _post(_vote(gradients, self._group.device), self._group)

    def _look(self, gradients: Iterable[Tensor]) -> bool:
        work, found = self._pending.pop(self._due())
        work.wait()
        return bool(found.item())


class PerStageOverflow(Overflow):
    """Decides for stages that update for a batch at different times.

    Args:
        group: Group of all ranks, for no other use.
        batch: Returns the index of the batch whose gradients are to be applied.
        is_everywhere: Returns whether all stages have updated for a batch: each rank alike, without
            waiting.
    """

    def __init__(
        self, group: DeviceGroup, batch: Callable[[], int], is_everywhere: Callable[[int], bool]
    ) -> None:
        self._group = group
        self._batch, self._is_everywhere = batch, is_everywhere
        self._posted: deque[tuple[int, dist.Work, Tensor]] = deque()

    @override
    def decide(self, gradients: Iterable[Tensor]) -> bool:
        found = _vote(gradients, self._group.device)
        decided = bool(found.item())
        work, found = _post(found, self._group)
        self._posted.append((self._batch(), work, found))
        return decided

    @override
    def outcomes(self) -> Iterator[bool]:
        while self._posted and self._is_everywhere(self._posted[0][0]):
            _, work, found = self._posted.popleft()
            work.wait()
            yield bool(found.item())


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Returns whether all elements of gradients are finite; of a sharded one, this rank's."""
    finite = _finite(gradients)
    return finite is None or bool(finite.item())


def _finite(gradients: Iterable[Tensor]) -> Tensor | None:
    votes = [local_part(gradient).isfinite().all() for gradient in gradients]
    # Gradients of offloaded shards are on the host, and those of whole parameters are not.
    return torch.stack([vote.to(votes[0].device) for vote in votes]).all() if votes else None


def _vote(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns 1 if a gradient is not finite, else 0, without reading it on the host."""
    finite = _finite(gradients)
    if finite is None:
        return torch.zeros((), dtype=torch.int32, device=device)
    return finite.logical_not().to(device, torch.int32)


def _post(found: Tensor, group: DeviceGroup) -> tuple[dist.Work, Tensor]:
    shared = found.clone()
    work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group.group, async_op=True)
    assert work is not None
    return work, shared

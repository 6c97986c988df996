"""The norm of a whole model's gradient, whose parts are on several ranks.

Shards add up their squared norms over the mesh of their tensors, stages over a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import get_total_norm

from lightning_dist.engine.tensors.dtensor import local_part

FindNorm = Callable[[Sequence[Sequence[Tensor]]], Tensor]
"""Returns the norm of the whole gradient; takes the parameters, grouped by how they are spread."""


def norm_over(group: dist.ProcessGroup | None = None) -> FindNorm:
    """Returns a function that computes the norm of the gradient over all shards and stages.

    Args:
        group: Group of the stages, for CPU tensors; None if each rank knows all parameters.
    """
    return lambda kinds: _norm(kinds, group)


def exclude_tied(copies: Callable[[], Iterable[Tensor]], find_norm: FindNorm) -> FindNorm:
    """Returns a function that leaves the parameters out that another rank counts.

    Args:
        copies: Lists the parameters that this rank does not count.
        find_norm: Computes the norm of the remaining parameters.
    """

    def find(kinds: Sequence[Sequence[Tensor]]) -> Tensor:
        others = {id(parameter) for parameter in copies()}
        counted = [[p for p in alike if id(p) not in others] for alike in kinds]
        return find_norm([alike for alike in counted if alike])

    return find


class AsyncGradNorm:
    """All-reduces gradient norms over the stages while they compute, before an update is due.

    A stage has an update's gradients some micro-batches before the update, later stages earlier.
    So each stage starts the all-reduce as soon as it has its gradients, on gloo's threads. It
    waits for the sum when it clips. By then all stages have joined the all-reduce, if a batch has
    at least as many micro-batches as there are stages after the first. Then the gradients that the
    last stage sends for a batch reach the first stage before the last stage ends its next batch.

    Args:
        group: Group of the stages, for CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Starts the all-reduce of an update's norm; does not wait for the other stages.

        Args:
            update: Index of the update since the last drain.
            gradients: This stage's gradients of the update.
        """
        if update == 0:
            self._pending.clear()  # norms from before the drain that no update has read
        own = list(gradients)
        squared = _squared_norm(own).cpu() if own else torch.zeros((), dtype=torch.float64)
        work = dist.all_reduce(squared, group=self._group, async_op=True)
        assert work is not None
        self._pending[update] = (work, squared)

    def of(self, update: int) -> Tensor:
        """Returns the norm of an update's gradient; waits for all stages.

        Args:
            update: Index of the update since the last drain; earlier norms are dropped.
        """
        work, squared = self._pending[update]
        work.wait()
        self._pending = {u: pending for u, pending in self._pending.items() if u > update}
        return squared.sqrt()


def _norm(kinds: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None) -> Tensor:
    squared = [_squared_norm([p.grad for p in alike if p.grad is not None]) for alike in kinds]
    stays = group is None and squared  # the norm moves to the CPU only for an all-reduce
    total = torch.zeros((), dtype=torch.float64, device=squared[0].device if stays else "cpu")
    for summand in squared:
        total += summand.to(total.device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    own = get_total_norm([local_part(g) for g in gradients]).double().square()
    first = gradients[0]
    if not isinstance(first, DTensor):
        return own
    summands = [Replicate() if p.is_replicate() else Partial() for p in first.placements]
    return DTensor.from_local(own, first.device_mesh, summands, run_check=False).full_tensor()

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
"""Takes the parameters, grouped by how they are spread; gives the norm of the whole gradient."""


def norm_over(group: dist.ProcessGroup | None = None) -> FindNorm:
    """Gives what adds up the norms of all shards, and of all stages when they are asked.

    Args:
        group: The stages; takes CPU tensors. None where each rank knows all parameters.
    """
    return lambda kinds: _norm(kinds, group)


def exclude_tied(copies: Callable[[], Iterable[Tensor]], find_norm: FindNorm) -> FindNorm:
    """Leaves out of a norm what another rank counts.

    Args:
        copies: Lists the parameters that are not counted here.
        find_norm: Finds the norm of the others.
    """

    def find(kinds: Sequence[Sequence[Tensor]]) -> Tensor:
        others = {id(parameter) for parameter in copies()}
        counted = [[p for p in alike if id(p) not in others] for alike in kinds]
        return find_norm([alike for alike in counted if alike])

    return find


class AsyncGradNorm:
    """Norms that the stages agree on while they work, for updates that are not yet due.

    A stage has an update's gradients some micro-batches before the update, and the later stages
    have them earlier. So each adds its own to a sum as soon as it can, which gloo's threads do, and
    waits for the sum when it clips. By then all stages have joined it: with as many micro-batches
    per batch as there are stages after the first, what the last stage sends back when its batch is
    complete has come to the first one before the last has ended its next batch.

    Args:
        group: The stages; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: dict[int, tuple[dist.Work, Tensor]] = {}

    def post(self, update: int, gradients: Iterable[Tensor]) -> None:
        """Joins the sum; returns at once.

        Args:
            update: Which, counted since the last drain.
            gradients: Of this stage.
        """
        if update == 0:
            self._pending.clear()  # nobody has asked for them
        own = list(gradients)
        squared = _squared_norm(own).cpu() if own else torch.zeros((), dtype=torch.float64)
        work = dist.all_reduce(squared, group=self._group, async_op=True)
        assert work is not None
        self._pending[update] = (work, squared)

    def of(self, update: int) -> Tensor:
        """Waits for a norm.

        Args:
            update: Which; earlier ones are forgotten.
        """
        work, squared = self._pending[update]
        work.wait()
        self._pending = {u: pending for u, pending in self._pending.items() if u > update}
        return squared.sqrt()


def _norm(kinds: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None) -> Tensor:
    squared = [_squared_norm([p.grad for p in alike if p.grad is not None]) for alike in kinds]
    stays = group is None and squared  # waiting for a GPU only where others wait for its norm
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

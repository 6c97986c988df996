"""Collectives that keep the data replicas of a stage equal, after each step or now and then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.data_parallel.outer_optimizer import OuterSteps

_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def broadcast_state(tensors: Iterable[Tensor], group: DeviceGroup) -> None:
    """Broadcasts the first rank's parameters and buffers. Collective: every rank must call it.

    Args:
        tensors: Tensors of the same shapes on each rank of the group, on any device.
        group: Group of the ranks.
    """
    if group.size == 1:
        return
    for tensor in tensors:
        sent = tensor.detach().to(group.device).contiguous()
        dist.broadcast(sent, group_src=0, group=group.group)
        tensor.copy_(sent)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: DeviceGroup) -> None:
    """Averages ``p.grad`` over the replicas, in buckets. Collective: every rank must call it.

    Args:
        parameters: Parameters, the same on each rank; without a gradient one is left out.
        group: Group of the replicas.
    """
    average([p.grad for p in parameters if p.grad is not None], group)


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: DeviceGroup) -> None:
    """Averages tensors over the replicas in place. Collective: every rank must call it.

    Args:
        tensors: Tensors of the same shapes on each rank of the group, sent in buckets.
        group: Group of the replicas.
    """
    size = group.size
    pending = []
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(group.device)
        work = dist.all_reduce(flat, group=group.group, async_op=True)
        assert work is not None
        pending.append((work, flat, bucket))
    for work, flat, bucket in pending:
        work.wait()
        pieces = (flat / size).split([tensor.numel() for tensor in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    for _, run in groupby(tensors, key=lambda t: t.dtype):
        filled = _BUCKET_BYTES
        for tensor in run:
            num_bytes = tensor.numel() * tensor.element_size()
            if filled + num_bytes > _BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += num_bytes
    return buckets


class LocalSGD:
    """Counts a replica's local steps, and averages the weights when they are due.

    Between two averages nothing is sent (Stich, ICLR 2019). With a warm-up on averaged gradients,
    the method is post-local SGD (Lin et al., ICLR 2020). The optimizers' state stays each replica's
    own. Validation and checkpoints must see the average, so the weights are also averaged there.

    Args:
        module: This rank's replica.
        group: Group of the replicas.
        sync_every: Optimizer steps from one average of the weights to the next; 1 without ``outer``
            averages the gradients of each step instead.
        warmup_steps: Steps with averaged gradients at the start.
        outer: Steps from the weights of one average to those of the next (DiLoCo). None takes the
            average itself.
    """

    def __init__(
        self,
        module: nn.Module,
        group: DeviceGroup,
        sync_every: int,
        warmup_steps: int,
        outer: OuterSteps | None = None,
    ) -> None:
        self._module = module
        self._group = group
        self._sync_every = sync_every
        self._warmup_steps = warmup_steps
        self._outer = outer
        self._is_alone = group.size == 1 and outer is None
        self._num_local_steps = 0
        self._stepped: set[nn.Parameter] = set()

    def is_local(self, step: int) -> bool:
        """Returns whether a step's gradients are not averaged; a single replica never averages."""
        keeps_weights = self._sync_every > 1 or self._outer is not None
        return self._is_alone or (keeps_weights and step >= self._warmup_steps)

    def begin_step(self) -> None:
        """Notes that a local step is about to begin."""
        if self._outer is not None:
            self._outer.begin(p for p in self._module.parameters() if p.requires_grad)

    def count_step(self) -> None:
        """Notes a local step; averages the weights when they are due."""
        if self._is_alone:
            return
        self._num_local_steps += 1
        # Now, for a parameter may be frozen between its last step and the average.
        self._stepped.update(p for p in self._module.parameters() if p.requires_grad)
        if self._num_local_steps == self._sync_every:
            self.average()

    def average(self) -> None:
        """Averages the weights, if a step has been local since the last average."""
        if self._num_local_steps == 0:
            return
        self._num_local_steps = 0
        stepped = [p for p in self._module.parameters() if p in self._stepped]
        self._stepped.clear()
        buffers = [b for b in self._module.buffers() if b.is_floating_point()]
        average([*(p.data for p in stepped), *buffers], self._group)
        if self._outer is not None:
            self._outer.step(stepped)

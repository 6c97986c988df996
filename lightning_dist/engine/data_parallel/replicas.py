"""Collectives that keep the data replicas of a stage equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.tensors.dtensor import is_dtensor, local_part

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
    for tensor, mean in zip(tensors, PendingAverage(tensors, group).wait(), strict=True):
        tensor.copy_(mean)


class PendingAverage:
    """The average of tensors over the replicas, under way. Collective: every rank must begin it.

    Args:
        tensors: Tensors of the same shapes on each rank of the group, sent in buckets; of a DTensor
            this rank's shard. They may change while it is under way.
        group: Group of the replicas.
        wire: What is sent; None sends the tensors' own dtype.
    """

    @torch.no_grad()
    def __init__(
        self, tensors: Sequence[Tensor], group: DeviceGroup, wire: torch.dtype | None = None
    ) -> None:
        self._size = group.size
        self._tensors = tensors
        self._buckets: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for bucket in _buckets([local_part(tensor) for tensor in tensors]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(group.device, wire)
            work = dist.all_reduce(flat, group=group.group, async_op=True)
            assert work is not None
            self._buckets.append((work, flat, bucket))

    @torch.no_grad()
    def wait(self) -> list[Tensor]:
        """Returns the means, with the shapes, dtypes and devices of the tensors."""
        means: list[Tensor] = []
        for work, flat, bucket in self._buckets:
            work.wait()
            pieces = (flat / self._size).split([tensor.numel() for tensor in bucket])
            means += [p.view_as(t).to(t) for t, p in zip(bucket, pieces, strict=True)]
        return [_placed(m, t) for m, t in zip(means, self._tensors, strict=True)]


def _placed(own: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor like another one; of a DTensor, given this rank's shard."""
    if not is_dtensor(like):
        return own
    placed = torch.empty_like(like)  # on the host if the shards are there
    local_part(placed).copy_(own)
    return placed


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

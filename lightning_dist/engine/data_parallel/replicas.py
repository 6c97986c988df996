"""Collectives that keep the data replicas of a stage equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def broadcast_state(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcasts the first rank's parameters and buffers. Collective: every rank must call it."""
    if dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        dist.broadcast(host, group_src=0, group=group)
        tensor.copy_(host)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Averages ``p.grad`` over the replicas, in buckets. Collective: every rank must call it.

    Args:
        parameters: Parameters, the same on each rank; without a gradient one is left out.
        group: Group of the replicas, for CPU tensors.
    """
    average([p.grad for p in parameters if p.grad is not None], group)


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Averages tensors over the replicas in place. Collective: every rank must call it.

    Args:
        tensors: Tensors of the same shapes on each rank of the group, sent in buckets.
        group: Group of the replicas, for CPU tensors.
    """
    size = dist.get_world_size(group)
    pending = []
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).cpu()
        work = dist.all_reduce(flat, group=group, async_op=True)
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

"""Collectives that keep the data replicas of a stage equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.tensors.dtensor import is_dtensor, local_part
from lightning_dist.engine.tensors.fingerprints import fingerprint

_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def broadcast_state(tensors: Iterable[Tensor], group: DeviceGroup) -> None:
    """Broadcasts the first rank's parameters and buffers, on any device. Collective."""
    if group.size == 1:
        return
    for tensor in tensors:
        sent = tensor.detach().to(group.device).contiguous()
        # As bytes, for backends do not take all dtypes.
        dist.broadcast(sent.reshape(-1).view(torch.uint8), group_src=0, group=group.group)
        tensor.copy_(sent)


@torch.no_grad()
def find_difference(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> str | None:
    """Returns the name of the first tensor whose bits differ between ranks, if there is one.

    Collective: every rank of the gloo group must call it, with tensors of the same names and sizes.
    """
    names, tensors = zip(*named, strict=True)
    flags = _differ(tensors, DeviceGroup(group, torch.device("cpu")))
    return next((name for name, differs in zip(names, flags, strict=True) if differs), None)


@torch.no_grad()
def differing(tensors: Sequence[Tensor], group: DeviceGroup) -> list[Tensor]:
    """Returns the tensors whose bits differ between ranks. Collective: every rank must call it."""
    if not tensors:
        return []
    flags = _differ([local_part(tensor) for tensor in tensors], group)
    return [tensor for tensor, differs in zip(tensors, flags, strict=True) if differs]


def _differ(tensors: Sequence[Tensor], group: DeviceGroup) -> list[bool]:
    prints = torch.stack([fingerprint(tensor).cpu() for tensor in tensors])
    extremes = torch.stack([prints, -prints]).to(group.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group.group)
    return [bool(differs) for differs in (extremes[0] != -extremes[1]).tolist()]


@torch.no_grad()
def average_gradients(
    parameters: Iterable[nn.Parameter], group: DeviceGroup, wire: torch.dtype | None = None
) -> None:
    """Averages ``p.grad`` over the replicas, as :func:`average_used` does."""
    own = [p for p in parameters if p.requires_grad or p.grad is not None]
    found = average_used([p.grad for p in own], own, group, wire)
    for parameter, gradient in zip(own, found, strict=True):
        parameter.grad = gradient


@torch.no_grad()
def average_used(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    group: DeviceGroup,
    wire: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Averages gradients over the replicas, in place. Collective: every rank must call it.

    A replica whose share of the batch has not used a parameter counts as zero, as on one device. If
    none has used it, it has no gradient. The parameters are the same on each rank. ``wire`` is the
    dtype that is sent; None sends the gradients' own.
    """
    if group.size == 1 or not parameters:
        return list(gradients)
    sent = [
        torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)
    ]
    last = local_part(sent[-1])
    # Not a tensor of a list, whose copy to an accelerator the host would wait for.
    are_used = torch.ones(len(sent), dtype=last.dtype, device=last.device)
    for index, gradient in enumerate(gradients):
        if gradient is None:
            are_used[index] = 0.0
    average([*sent, are_used], group, wire)
    if all(gradient is not None for gradient in gradients):
        return list(gradients)
    return [mean if used else None for mean, used in zip(sent, are_used.tolist(), strict=True)]


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: DeviceGroup, wire: torch.dtype | None = None) -> None:
    """Averages tensors over the replicas in place. Collective: every rank must call it.

    Two buckets are under way at a time: while the host fills or empties one, the other travels.
    More would only hold more copies. Of a DTensor this rank's shard is sent. ``wire`` is the dtype
    that is sent; None sends the tensors' own.
    """
    under_way: deque[_Bucket] = deque()
    for bucket in _buckets([local_part(tensor) for tensor in tensors]):
        if len(under_way) == 2:
            under_way.popleft().write_means()
        under_way.append(_Bucket(bucket, group, wire))
    for sent in under_way:
        sent.write_means()


class PendingAverage:
    """The average of tensors over the replicas, under way. Collective: every rank must begin it.

    The arguments are those of :func:`average`. The tensors may change while it is under way.
    """

    @torch.no_grad()
    def __init__(
        self, tensors: Sequence[Tensor], group: DeviceGroup, wire: torch.dtype | None = None
    ) -> None:
        self._tensors = tensors
        parts = [local_part(tensor) for tensor in tensors]
        self._sent = [_Bucket(bucket, group, wire) for bucket in _buckets(parts)]

    @torch.no_grad()
    def wait(self) -> list[Tensor]:
        """Returns the means, with the shapes, dtypes and devices of the tensors."""
        pairs = [pair for sent in self._sent for pair in zip(sent.parts, sent.wait(), strict=True)]
        means = [mean.to(part) for part, mean in pairs]
        return [_placed(m, t) for m, t in zip(means, self._tensors, strict=True)]


class _Bucket:
    """Some tensors whose sum over the replicas is under way, in one message."""

    def __init__(self, parts: list[Tensor], group: DeviceGroup, wire: torch.dtype | None) -> None:
        self.parts = parts
        self._num_replicas = group.size
        numbers = [_as_real(part) for part in parts]
        self._sizes = [own.numel() for own in numbers]
        self._sum = torch.cat([own.reshape(-1) for own in numbers]).to(group.device, wire)
        work = dist.all_reduce(self._sum, group=group.group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> list[Tensor]:
        """Returns the means, with the shapes of the tensors; mostly views of the message."""
        self._work.wait()
        means = self._sum.div_(self._num_replicas).split(self._sizes)
        return [_from_real(mean, part) for part, mean in zip(self.parts, means, strict=True)]

    def write_means(self) -> None:
        """Writes the means into the tensors."""
        for part, mean in zip(self.parts, self.wait(), strict=True):
            part.copy_(mean)


def _as_real(part: Tensor) -> Tensor:
    """Returns a tensor's numbers, of which a complex one has two for each element."""
    # A wire is real, and a cast to it would drop the imaginary parts.
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def _from_real(numbers: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor of the shape of another one, given its numbers in a row."""
    if not like.is_complex():
        return numbers.view_as(like)
    # There are no complex numbers in bfloat16.
    pairs = numbers.to(like.dtype.to_real()).view(*like.shape, 2)
    return torch.view_as_complex(pairs)


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
        buckets.append([])
        filled = 0
        for tensor in run:
            num_bytes = tensor.numel() * tensor.element_size()
            if buckets[-1] and filled + num_bytes > _BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += num_bytes
    return buckets

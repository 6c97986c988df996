"""Averages of gradients in fewer bytes, which add what they lose to the next gradients.

Both are hooks of torch's DistributedDataParallel. ``"topk"`` sends the largest elements of each
parameter's gradient and their places (Aji & Heafield, EMNLP 2017). ``"int8"`` sends integers and a
scale for each block of them, in two rounds: each rank adds up a part of the bucket and sends its
mean to all (Tang et al., 1-bit Adam, ICML 2021, section 4), so its bytes do not grow with the
number of ranks. What a rank's message leaves out, it adds to its next gradient, without which the
errors would add up (Karimireddy et al., ICML 2019). The error of a mean is one rank's to add.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.data_parallel.used_parameters import UsedParameters

BLOCK = 256
_LARGEST = 127

Averaged = torch.futures.Future[Tensor]


class ErrorFeedback(ABC):
    """Averages buckets over the replicas, and holds what each parameter's gradients have lost."""

    def __init__(self, group: dist.ProcessGroup, used: UsedParameters | None) -> None:
        self.group = group
        self._used = used  # None if each backward uses all parameters
        self._lost: dict[Tensor, Tensor] = {}  # by parameter

    def average(self, bucket: dist.GradBucket) -> Averaged:
        """Begins to average a bucket over the replicas.

        Parameters that no rank has used keep what they have: the gradient of an earlier backward,
        which is the same on all ranks, and what their gradients have lost.
        """
        parameters = bucket.parameters()
        # A bucket has two numbers for each element of a complex parameter.
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        flat = bucket.buffer() / self.group.size()
        pieces = flat.split(sizes)
        kept: list[tuple[Tensor, Tensor]] = []
        rows = zip(
            parameters, pieces, bucket.buffer().split(sizes), self._are_used(bucket), strict=True
        )
        for parameter, piece, gradient, is_used in rows:
            rest = self._lost.get(parameter)
            if is_used:
                if rest is not None:
                    piece += rest
                # A view of `flat`, which a round may still write into.
                self._lost[parameter] = piece
                continue
            piece.zero_()
            kept.append((gradient, gradient.clone()))
            if rest is not None:
                self._lost[parameter] = rest.clone()  # the view would hold a whole older bucket
        averaged = self.send(bucket, flat, pieces)
        if not kept:
            return averaged

        def restore(averaged: Averaged) -> Tensor:
            for gradient, own in kept:
                if own.is_cuda:  # here another stream is current, and the backward goes on
                    own.record_stream(torch.cuda.current_stream(own.device))
                gradient.copy_(own)
            return averaged.value()

        return averaged.then(restore)

    def _are_used(self, bucket: dist.GradBucket) -> list[bool]:
        """Returns for each parameter of a bucket whether a rank has used it."""
        parameters = bucket.parameters()
        if self._used is None:
            return [True] * len(parameters)
        own = torch.tensor(self._used.take(parameters), dtype=torch.uint8)
        flags = own.to(bucket.buffer().device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        return [bool(flag) for flag in flags.tolist()]

    @abstractmethod
    def send(self, bucket: dist.GradBucket, flat: Tensor, pieces: tuple[Tensor, ...]) -> Averaged:
        """Begins to average into a bucket, and leaves what is lost in place of the gradients.

        ``flat`` has the bucket's gradients over the number of ranks, and what was lost before;
        ``pieces`` are its views, by parameter.
        """


class TopK(ErrorFeedback):
    """Sends a fraction of each parameter's elements, those of largest magnitude, at least one."""

    def __init__(
        self, group: dist.ProcessGroup, used: UsedParameters | None, fraction: float
    ) -> None:
        super().__init__(group, used)
        self._fraction = fraction

    def send(self, bucket: dist.GradBucket, flat: Tensor, pieces: tuple[Tensor, ...]) -> Averaged:
        """Implements :meth:`ErrorFeedback.send`."""
        places, start = [], 0
        for piece in pieces:
            if count := min(piece.numel(), max(1, round(self._fraction * piece.numel()))):
                places.append(piece.abs().topk(count, sorted=False).indices + start)
            start += piece.numel()
        own = torch.cat(places)
        message = torch.cat([_bytes_of(flat[own]), _bytes_of(own.int())])
        flat[own] = 0.0
        _drop_not_finite(flat)
        gathered, work = _gather(message, self.group)

        def add_up(_: object) -> Tensor:
            mean = bucket.buffer().zero_()
            num_bytes = own.numel() * mean.element_size()
            for part in gathered:  # in the same order on each rank
                values, indices = part[:num_bytes], part[num_bytes:]
                # Parts of a message begin at any byte, elements do not.
                mean.index_add_(
                    0, indices.clone().view(torch.int32), values.clone().view(mean.dtype)
                )
            return mean

        return _future_of(work).then(add_up)


class Int8(ErrorFeedback):
    """Sends 8-bit integers, and a scale in float32 for each block of them."""

    def send(self, bucket: dist.GradBucket, flat: Tensor, pieces: tuple[Tensor, ...]) -> Averaged:
        """Implements :meth:`ErrorFeedback.send`."""
        size, rank = self.group.size(), self.group.rank()
        share = -(-flat.numel() // (size * BLOCK)) * BLOCK  # of a rank, in whole blocks
        padded = flat.new_zeros(size, share)
        padded.view(-1)[: flat.numel()] = flat
        sent = _quantised(padded)
        padded -= _restored(sent, flat.dtype)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)

        def send_mean(_: object) -> Tensor:
            if padded.is_cuda:  # here another stream is current, and the backward goes on
                padded.record_stream(torch.cuda.current_stream(padded.device))
            mean = _restored(received, flat.dtype).sum(0)
            message = _quantised(mean)
            padded[rank] += mean - _restored(message, flat.dtype)
            flat.copy_(_drop_not_finite(padded).view(-1)[: flat.numel()])
            gathered, work = _gather(message, self.group)
            _future_of(work).wait()
            means = _restored(gathered, flat.dtype).view(-1)[: flat.numel()]
            return bucket.buffer().copy_(means)

        return _future_of(work).then(send_mean)


def _gather(message: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """Begins to gather the messages of all ranks, in rows."""
    rows = message.new_empty(group.size(), message.numel())
    return rows, dist.all_gather(list(rows), message, group, async_op=True)


def _future_of(work: dist.Work | None) -> torch.futures.Future[list[Tensor]]:
    assert work is not None
    return work.get_future()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _quantised(values: Tensor) -> Tensor:
    """Returns the message of each row: its integers, then the scales of their blocks, as bytes."""
    blocks = values.to(_wide(values.dtype)).unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / _LARGEST).float()
    # A block of zeros has the scale zero. Of one with an infinity any integers will do.
    steps = scales.where(scales > 0, 1.0).to(blocks.dtype)
    # A scale near the smallest float32 is rounded so much that it would take more than 127 steps.
    integers = (blocks / steps).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat([_bytes_of(integers.flatten(-2)), _bytes_of(scales.flatten(-2))], -1)


def _restored(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of each message; those of a block that was not finite are nan."""
    length = messages.shape[-1] * BLOCK // (BLOCK + 4)
    integers = messages[..., :length].contiguous().view(torch.int8)
    scales = messages[..., length:].contiguous().view(torch.float32)
    blocks: Tensor = integers.unflatten(-1, (-1, BLOCK)).to(_wide(dtype))
    return blocks.mul_(scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute in: in half precision an element may round to 128 steps."""
    return torch.promote_types(dtype, torch.float32)


def _drop_not_finite(lost: Tensor) -> Tensor:
    """Clears what a step with an overflow, which is left out, would leave for all later ones."""
    return lost.nan_to_num_(0.0, 0.0, 0.0)

"""Compression of gradients between data replicas.

The hooks are torch's. ``fp16`` and ``bf16`` halve the bytes of float32 gradients and round each
rank's share once before the sum. PowerSGD (Vogels et al., NeurIPS 2019) sends a low-rank factor of
each matrix and adds what it has lost to the next step's gradient.
"""

# No postponed annotations here: torch compares those of a hook with its own classes.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from lightning_dist.engine.comms.failures.peer_failure import never_destroy

Compression = Literal["none", "fp16", "bf16", "powersgd"]
CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


@dataclass(frozen=True, slots=True)
class Compressor:
    """A DDP communication hook and the count of its bytes.

    Attributes:
        state: The hook's first argument.
        hook: Averages a bucket over the ranks.
        sent_bytes: Returns the bytes that a rank sends for a bucket; called right after the hook.
    """

    state: Any
    hook: CommHook
    sent_bytes: Callable[[dist.GradBucket], int]


def make_compressor(
    group: dist.ProcessGroup,
    compression: Compression,
    *,
    powersgd_rank: int,
    powersgd_start_step: int,
) -> Compressor:
    """Creates the compressor that averages a model's gradients.

    Args:
        group: The data replicas.
        compression: The compression of the gradients.
        powersgd_rank: Columns of PowerSGD's factors.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins.
    """
    if compression == "fp16":
        return Compressor(group, default_hooks.fp16_compress_hook, _half_bytes)
    if compression == "bf16":
        return Compressor(group, _average_in_bf16, _half_bytes)
    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=powersgd_start_step,
        )
        # The hook's callbacks hold the group, and gloo's own thread may free the last callback.
        # If the group is destroyed on that thread, it waits for the thread itself: std::terminate.
        never_destroy([group])
        return Compressor(state, powerSGD_hook.powerSGD_hook, _FactorBytes(state))
    return Compressor(group, default_hooks.allreduce_hook, _whole_bytes)


def _average_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Runs torch's hook under another name, for DDP refuses torch's own name without NCCL."""
    hook: CommHook = default_hooks.bf16_compress_hook
    return hook(group, bucket)


def _whole_bytes(bucket: dist.GradBucket) -> int:
    return bucket.buffer().nbytes


def _half_bytes(bucket: dist.GradBucket) -> int:
    return 2 * bucket.buffer().numel()


class _FactorBytes:
    """Reads PowerSGD's own count of sent elements: both factors, and uncompressed vectors."""

    def __init__(self, state: powerSGD_hook.PowerSGDState) -> None:
        self._state = state
        self._counted = 0

    def __call__(self, bucket: dist.GradBucket) -> int:
        before, self._counted = self._counted, self._state.compression_stats()[2]
        num_elements = self._counted - before or bucket.buffer().numel()  # none: not yet begun
        return num_elements * bucket.buffer().element_size()

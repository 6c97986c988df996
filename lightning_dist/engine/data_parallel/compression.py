"""Compression of gradients between data replicas.

The hooks are torch's. ``fp16`` and ``bf16`` halve the bytes of float32 gradients and round each
rank's share once before the sum. PowerSGD (Vogels et al., NeurIPS 2019) sends a low-rank factor of
each matrix and adds what it has lost to the next step's gradient.
"""

# No postponed annotations here: torch compares those of a hook with its own classes.
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from lightning_dist.engine.comms.failures.peer_failure import never_destroy

Compression = Literal["none", "fp16", "bf16", "powersgd"]
CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def comm_hook(
    group: dist.ProcessGroup,
    compression: Compression,
    *,
    powersgd_rank: int,
    powersgd_start_step: int,
) -> tuple[Any, CommHook]:
    """Creates the hook that averages a model's compressed gradients, bucket by bucket.

    Args:
        group: The data replicas.
        compression: The compression of the gradients, not ``"none"``.
        powersgd_rank: Columns of PowerSGD's factors.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins.

    Returns:
        The hook's first argument, and the hook.
    """
    if compression == "fp16":
        return group, default_hooks.fp16_compress_hook
    if compression == "bf16":
        return group, _average_in_bf16
    assert compression == "powersgd"
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=powersgd_rank,
        start_powerSGD_iter=powersgd_start_step,
    )
    # The hook's callbacks hold the group, and gloo's own thread may free the last callback. If the
    # group is destroyed on that thread, it waits for the thread itself: std::terminate.
    never_destroy([group])
    return state, powerSGD_hook.powerSGD_hook


def _average_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Runs torch's hook under another name, for DDP refuses torch's own name without NCCL."""
    hook: CommHook = default_hooks.bf16_compress_hook
    return hook(group, bucket)

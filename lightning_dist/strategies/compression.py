"""What gradients travel as between data replicas.

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
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.strategies.last_resort import never_destroy

Compression = Literal["none", "fp16", "bf16", "powersgd"]
CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def _average_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Runs torch's hook under another name: by its own it is refused wherever NCCL is missing."""
    hook: CommHook = default_hooks.bf16_compress_hook
    return hook(group, bucket)


def compress_gradients(
    ddp: DistributedDataParallel,
    compression: Compression,
    *,
    powersgd_rank: int,
    powersgd_start_step: int,
) -> None:
    """Chooses what the gradients of a wrapped model travel as.

    Args:
        ddp: The wrapped model.
        compression: The way.
        powersgd_rank: Columns of PowerSGD's factors.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins.
    """
    group = ddp.process_group
    if compression == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif compression == "bf16":
        ddp.register_comm_hook(group, _average_in_bf16)
    elif compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=powersgd_start_step,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        # The hook's callbacks hold the group, and gloo's own thread may be the last to let go of
        # one. A group that is destroyed there would wait for that thread: std::terminate.
        never_destroy([group])

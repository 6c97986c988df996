"""Let FSDP2 forget a step that an exception has cut short; torch has a method for it since 2.13.

Before, units that were in the middle of the step stay gathered, and the next backward would take
itself for a part of the one that failed. There is no public way out, so this is the one place that
writes what FSDP2 notes of a step; it is for the versions before 2.13 only, which do not change any
more.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def forget_step(root: nn.Module) -> None:
    """Lets all units begin anew, their parameters sharded and no gradients on their way.

    Args:
        root: Sharded.
    """
    assert isinstance(root, FSDPModule)
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            _forget(module._get_fsdp_state())
            module.reshard()


def _forget(state: Any) -> None:
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    state._modules_to_run_forward.clear()
    state._training_state = TrainingState.IDLE
    group = state._fsdp_param_group
    if group is not None:
        group._training_state = TrainingState.IDLE
        group._all_gather_result = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()

"""Private functions of torch's DistributedDataParallel, for a backward inside its forward.

The wrapper prepares its reducer only for a backward after its forward. A step that calls backward
itself does so inside the wrapper's forward. These functions have no public counterpart.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors


def prepare_for_backward(ddp: DistributedDataParallel, outputs: object) -> None:
    """Makes the reducer expect a backward, as the wrapper's forward does when it returns."""
    if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
        return
    ddp.require_forward_param_sync = True
    finds_unused = ddp.find_unused_parameters and not ddp.static_graph
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward(list(_find_tensors(outputs)) if finds_unused else [])


def remove_gradient_hooks(ddp: DistributedDataParallel) -> None:
    """Removes a wrapper's hooks from its parameters."""
    ddp._remove_autograd_hooks()

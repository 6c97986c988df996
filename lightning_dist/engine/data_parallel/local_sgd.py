"""Local SGD: replicas step on their own gradients and average their weights now and then.

Between two averages nothing is sent (Stich, ICLR 2019). With a warm-up on averaged gradients, the
method is post-local SGD (Lin et al., ICLR 2020). The optimizers' state stays each replica's own.
Validation and checkpoints must see the average. So the weights are also averaged before each
validation, in each checkpoint and at the end, where an asynchronous pipeline is drained.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.engine.data_parallel.replicas import average


class LocalSGD:
    """Counts a replica's local steps, and averages the weights when they are due.

    Args:
        module: This rank's replica.
        group: Group of the replicas, for CPU tensors.
        sync_every: Optimizer steps from one average of the weights to the next; 1 averages the
            gradients of each step instead.
        warmup_steps: Steps with averaged gradients at the start.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, sync_every: int, warmup_steps: int
    ) -> None:
        self._module = module
        self._group = group
        self._sync_every = sync_every
        self._warmup_steps = warmup_steps
        self._is_alone = dist.get_world_size(group) == 1
        self._num_local_steps = 0
        self._stepped: set[nn.Parameter] = set()

    def is_local(self, step: int) -> bool:
        """Returns whether a step's gradients are not averaged; a single replica never averages."""
        return self._is_alone or (self._sync_every > 1 and step >= self._warmup_steps)

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
        tensors = [p.data for p in self._module.parameters() if p in self._stepped]
        self._stepped.clear()
        tensors += [b for b in self._module.buffers() if b.is_floating_point()]
        with torch.no_grad():
            average(tensors, self._group)

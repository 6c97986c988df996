"""Local SGD: replicas step on their own gradients and average their weights now and then.

Between two averages nothing travels (Stich, ICLR 2019). A warm-up with averaged gradients first
makes it post-local SGD (Lin et al., ICLR 2020). The optimizers' state stays each replica's own.
Whoever looks at the weights must see the average, so there is one more before each validation, in
each checkpoint and at the end, as an asynchronous pipeline is drained there.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.engine.data_parallel.meter import CommunicationMeter
from lightning_dist.engine.data_parallel.replicas import average


class LocalSGD:
    """One replica's count of the steps that the others do not know of.

    Args:
        module: The replica.
        group: The replicas; takes CPU tensors.
        sync_every: Optimizer steps from one average of the weights to the next; 1 averages the
            gradients of each step instead.
        warmup_steps: Steps with averaged gradients at the start.
        meter: Is told of what travels, if anybody wants to know.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        sync_every: int,
        warmup_steps: int,
        meter: CommunicationMeter | None = None,
    ) -> None:
        self._module = module
        self._group = group
        self._sync_every = sync_every
        self._warmup_steps = warmup_steps
        self._meter = meter
        self._is_alone = dist.get_world_size(group) == 1
        self._num_local_steps = 0
        self._stepped: set[nn.Parameter] = set()

    def is_local(self, step: int) -> bool:
        """Whether a step keeps its gradients to itself; one replica alone always does.

        Args:
            step: Optimizer steps before it, resumed ones included.
        """
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
        """Averages the weights, if a step has been local since the last time."""
        if self._num_local_steps == 0:
            return
        self._num_local_steps = 0
        tensors = [p.data for p in self._module.parameters() if p in self._stepped]
        self._stepped.clear()
        tensors += [b for b in self._module.buffers() if b.is_floating_point()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with torch.no_grad(), self._meter.sending(num_bytes) if self._meter else nullcontext():
            average(tensors, self._group)

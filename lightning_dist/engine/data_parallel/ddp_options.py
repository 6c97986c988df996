"""Options of torch's DistributedDataParallel, and the module that it wraps.

DistributedDataParallel prepares itself in its forward. A Lightning step is another method of the
module, so the wrapper gets a :class:`StepModule`, whose forward runs any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.data_parallel.error_feedback import Averaged, Int8, TopK
from lightning_dist.engine.data_parallel.used_parameters import UsedParameters

Compression = Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"]


class StepModule(nn.Module):
    """Runs a step of a LightningModule as its forward, inside of that of an inner one."""

    def __init__(self, module: nn.Module, inner: StepModule | None = None) -> None:
        super().__init__()
        self.module = module
        self.inner = inner

    def forward(self, step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a step."""
        if self.inner is not None:
            return self.inner(step, *arguments, **keywords)
        return step(*arguments, **keywords)


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """The options of torch's DistributedDataParallel that this package sets.

    Compression by ``"fp16"`` and ``"bf16"`` halves the bytes of float32 gradients and rounds each
    rank's share once before the sum. ``"powersgd"`` (Vogels et al., NeurIPS 2019) sends a low-rank
    factor of each matrix and adds what it has lost to the next step's gradient. So do ``"int8"``
    and ``"topk"``; see :mod:`.error_feedback`.
    """

    compression: Compression = "none"
    topk_fraction: float = 0.01  # of each gradient's elements
    powersgd_rank: int = 2  # columns of the factors
    powersgd_start_step: int = 1000  # steps with whole gradients before PowerSGD begins
    overlap: bool = True  # whether gradients are reduced while the backward runs
    bucket_megabytes: float = 25.0  # if `overlap`
    static_graph: bool = False  # whether each step uses the same autograd graph
    find_unused_parameters: bool = False  # whether steps may leave parameters out

    def wrap(
        self, module: nn.Module, group: dist.ProcessGroup, used: UsedParameters | None = None
    ) -> DistributedDataParallel:
        """Wraps a module, whose replicas are equal already.

        ``used`` tells what backwards have used, if they may leave parameters out.
        """
        ddp = DistributedDataParallel(
            StepModule(module),
            process_group=group,
            bucket_cap_mb=self._megabytes(module),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if self.compression != "none":  # torch's built-in average runs without Python
            self._register_hook(ddp, used)
        return ddp

    def _register_hook(self, ddp: DistributedDataParallel, used: UsedParameters | None) -> None:
        group = ddp.process_group
        if self.compression == "fp16":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif self.compression == "bf16":
            # Under another name, for DDP refuses torch's own name without NCCL.
            hook = default_hooks.bf16_compress_hook
            ddp.register_comm_hook(group, lambda group, bucket: hook(group, bucket))
        else:
            # The hook's callbacks hold the group, and gloo's own thread may free the last callback.
            # If the group is destroyed on that thread, it waits for the thread itself.
            never_destroy([group])
            average = self._average(group, used)
            # DDP reads the annotations of a hook, and not as strings.
            ddp.register_comm_hook(None, lambda _, bucket: average(bucket))

    def _average(
        self, group: dist.ProcessGroup, used: UsedParameters | None
    ) -> Callable[[dist.GradBucket], Averaged]:
        """Returns the function that begins to average a bucket, with what was lost before."""
        if self.compression == "topk":  # in one collective
            return TopK(group, used, self.topk_fraction).average
        if self.compression == "int8":
            return partial(_in_order, group, Int8(group, used).average)
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=self.powersgd_rank,
            start_powerSGD_iter=self.powersgd_start_step,
        )
        return partial(_in_order, group, partial(powerSGD_hook.powerSGD_hook, state))

    def _megabytes(self, module: nn.Module) -> float:
        if self.overlap:
            return self.bucket_megabytes
        # One bucket (of each dtype) has room for all: it leaves when the last gradient is there.
        return sum(p.nbytes for p in module.parameters() if p.requires_grad) / 2**20 + 1


def _in_order(
    group: dist.ProcessGroup,
    average: Callable[[dist.GradBucket], Averaged],
    bucket: dist.GradBucket,
) -> Averaged:
    """Averages a bucket in several collectives, with none of the next bucket's between them.

    NCCL's futures call back at once, so all ranks begin all collectives in the same order. gloo's
    call back when the tensors are there, so with several buckets under way each rank had an order
    of its own, and one bucket's message met another's. There a bucket waits for the one before.
    """
    averaged = average(bucket)
    if dist.get_backend(group) != dist.Backend.NCCL:
        averaged.wait()
    return averaged


def prepare_for_backward(ddp: DistributedDataParallel, outputs: object) -> None:
    """Makes the reducer expect a backward, as the wrapper's forward does when it returns.

    A step that calls backward itself does so inside the wrapper's forward, which prepares for a
    backward after it only. The functions for that are private in torch.
    """
    if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
        return
    ddp.require_forward_param_sync = True
    finds_unused = ddp.find_unused_parameters and not ddp.static_graph
    ddp.reducer._rebuild_buckets()
    ddp.reducer.prepare_for_backward(list(_find_tensors(outputs)) if finds_unused else [])


def remove_gradient_hooks(ddp: DistributedDataParallel) -> None:
    """Removes a wrapper's hooks from its parameters; torch has no public way to do so."""
    ddp._remove_autograd_hooks()

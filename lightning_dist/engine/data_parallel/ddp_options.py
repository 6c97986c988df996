"""Options of torch's DistributedDataParallel, and the module that it wraps.

DistributedDataParallel prepares itself in its forward. A Lightning step is another method of the
module, so the wrapper gets a :class:`StepModule`, whose forward runs any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.engine.data_parallel.compression import Compression, comm_hook


class StepModule(nn.Module):
    """Runs a step of a LightningModule as its forward.

    Args:
        module: The user's module; its parameters are this one's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a step."""
        return step(*arguments, **keywords)


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """The options of torch's DistributedDataParallel that this package sets.

    Attributes:
        compression: The compression of the gradients.
        powersgd_rank: Columns of PowerSGD's factors.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins.
        overlap: Whether gradients are reduced while the backward runs.
        bucket_megabytes: Size of a bucket, if ``overlap``.
        static_graph: Whether each step uses the same autograd graph.
        find_unused_parameters: Whether steps may leave parameters out.
    """

    compression: Compression
    powersgd_rank: int
    powersgd_start_step: int
    overlap: bool
    bucket_megabytes: float
    static_graph: bool
    find_unused_parameters: bool

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """Wraps a module, whose replicas are equal already."""
        ddp = DistributedDataParallel(
            StepModule(module),
            bucket_cap_mb=self._megabytes(module),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if self.compression != "none":  # torch's built-in average runs without Python
            state, hook = comm_hook(
                ddp.process_group,
                self.compression,
                powersgd_rank=self.powersgd_rank,
                powersgd_start_step=self.powersgd_start_step,
            )
            ddp.register_comm_hook(state, hook)
        return ddp

    def _megabytes(self, module: nn.Module) -> float:
        if self.overlap:
            return self.bucket_megabytes
        # One bucket (of each dtype) has room for all: it leaves when the last gradient is there.
        return sum(p.nbytes for p in module.parameters() if p.requires_grad) / 2**20 + 1

"""How the replicas of a model average their gradients.

Let a wrapper that hooks into ``forward`` see a LightningModule's steps.

DistributedDataParallel prepares itself in its forward. A Lightning step is another method of the
module, so the wrapper gets a module whose forward is whatever step is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.engine.data_parallel.compression import Compression, make_compressor
from lightning_dist.engine.data_parallel.meter import CommunicationMeter


class StepModule(nn.Module):
    """Runs a step of a LightningModule as its forward.

    Args:
        module: The user's module; its parameters are this one's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Runs a step.

        Args:
            step: Computes with the module's parameters.
            arguments: Of the step.
            keywords: Of the step.
        """
        return step(*arguments, **keywords)


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """The dials of torch's DistributedDataParallel that this package turns.

    Attributes:
        compression: What gradients travel as.
        powersgd_rank: Columns of PowerSGD's factors.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins.
        overlap: Whether gradients travel while the backward runs.
        bucket_megabytes: Size of a bucket, if they do.
        static_graph: As for the strategy.
        find_unused_parameters: As for the strategy.
    """

    compression: Compression
    powersgd_rank: int
    powersgd_start_step: int
    overlap: bool
    bucket_megabytes: float
    static_graph: bool
    find_unused_parameters: bool

    def wrap(self, module: nn.Module, meter: CommunicationMeter | None) -> DistributedDataParallel:
        """Wraps a module, whose replicas are equal already.

        Args:
            module: The user's.
            meter: Is told of what travels, if anybody wants to know.
        """
        ddp = DistributedDataParallel(
            StepModule(module),
            bucket_cap_mb=self._megabytes(module),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        if self.compression == "none" and meter is None:
            return ddp  # the average that is built in needs no Python
        compressor = make_compressor(
            ddp.process_group,
            self.compression,
            powersgd_rank=self.powersgd_rank,
            powersgd_start_step=self.powersgd_start_step,
        )
        hook = compressor.hook if meter is None else meter.watch(compressor)
        ddp.register_comm_hook(compressor.state, hook)
        return ddp

    def _megabytes(self, module: nn.Module) -> float:
        if self.overlap:
            return self.bucket_megabytes
        # One bucket (of each dtype) has room for all: it leaves when the last gradient is there.
        return sum(p.nbytes for p in module.parameters() if p.requires_grad) / 2**20 + 1

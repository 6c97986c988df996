"""Reduce the gradients of a rank's stages before the optimizer's step.

The gradients are averaged over the data replicas, summed over the stages that share a parameter,
and clipped by the norm of the whole model's gradient. If gradients are final before their update is
due, these sums are sent meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.data_parallel.replicas import average, average_gradients
from lightning_dist.engine.parallelize.clip_grad import AsyncGradNorm, clip_grad_norm_
from lightning_dist.engine.precision.overflow import AsyncOverflow
from lightning_dist.strategies.pipelining.session import Session


class StageGradients:
    """Reduces the gradients of some stages to those of the whole batch.

    Args:
        session: Returns the parts of the pipeline.
        replicas: The ranks that hold these stages and read other data; None if there are none.
        norms: Computes norms ahead of their update; None if norms are computed in the update.
        overflow: Votes ahead on skipping an update; None if no update is skipped, or the vote is
            in the update.
    """

    def __init__(
        self,
        session: Callable[[], Session],
        replicas: dist.ProcessGroup | None,
        norms: AsyncGradNorm | None,
        overflow: AsyncOverflow | None = None,
    ) -> None:
        self._session = session
        self._replicas = replicas
        self._norms = norms
        self._overflow = overflow

    def complete(self) -> None:
        """Averages the gradients in the parameters over the replicas."""
        if self._replicas is not None:
            parameters = self._session().pipeline.stages.named_parameters()
            average_gradients(parameters.values(), self._replicas)

    def complete_early(self, update: int, gradients: Mapping[str, Tensor]) -> None:
        """Averages gradients that are final, and starts their sums, norms and votes.

        Args:
            update: Number of the update that the gradients are for.
            gradients: The gradients by parameter name; changed.
        """
        if self._replicas is not None:
            average(list(gradients.values()), self._replicas)
        counted = self._session().tied.post(update, gradients)
        if self._norms is not None:
            self._norms.post(update, counted.values())
        if self._overflow is not None:
            self._overflow.post(update, gradients.values())

    def clip(self, stages: dist.ProcessGroup, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Clips this rank's gradients by the norm of the whole model's gradient.

        Args:
            stages: A group of the ranks of all stages, which takes CPU tensors.
            parameters: This rank's parameters.
            max_norm: Largest norm.
        """
        session = self._session()
        if self._norms is not None:
            norm = self._norms.of(session.pipeline.due_update)
            return clip_grad_norm_(parameters, max_norm, total_norm=norm)
        exclude = session.counted_elsewhere
        return clip_grad_norm_(parameters, max_norm, pp_group=stages, exclude=exclude)

"""What becomes of the gradients of a rank's stages before the optimizer takes them.

They are averaged over the data replicas, summed over the stages that share a parameter, and clipped
by the norm of the whole model's. Where they are complete before their update is due, the sums are
on their way meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.data_parallel.replicas import average, average_gradients
from lightning_dist.engine.parallelize.grad_norm import (
    AsyncGradNorm,
    FindNorm,
    exclude_tied,
    norm_over,
)
from lightning_dist.engine.precision.overflow import AsyncOverflow
from lightning_dist.strategies.pipelining.session import Session


class StageGradients:
    """Makes the gradients of some stages those of the whole batch.

    Args:
        session: Gives what is at work.
        replicas: The ranks that hold these stages and read other data; None if there are none.
        norms: Where norms are found ahead of their update; None where they are found in it.
        overflow: Where it is found ahead whether an update is left out; None where nothing is, or
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
        """Averages the gradients that are in place over the replicas."""
        if self._replicas is not None:
            parameters = self._session().pipeline.stages.named_parameters()
            average_gradients(parameters.values(), self._replicas)

    def complete_early(self, update: int, gradients: Mapping[str, Tensor]) -> None:
        """Averages gradients that are complete, and sends off what other stages must know of them.

        Args:
            update: What they are for.
            gradients: By parameter name; changed.
        """
        if self._replicas is not None:
            average(list(gradients.values()), self._replicas)
        counted = self._session().tied.post(update, gradients)
        if self._norms is not None:
            self._norms.post(update, counted.values())
        if self._overflow is not None:
            self._overflow.post(update, gradients.values())

    def find_norm(self, stages: dist.ProcessGroup) -> FindNorm:
        """Gives what finds the norm of the whole model's gradient.

        Args:
            stages: The ranks of all stages; takes CPU tensors.
        """
        norms = self._norms
        if norms is None:
            return exclude_tied(lambda: self._session().counted_elsewhere, norm_over(stages))
        return lambda _: norms.of(self._session().pipeline.due_update)

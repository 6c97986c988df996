"""Weights as the optimizer will about have made them when a micro-batch's update is applied.

Each forward gets copies of its own, and its backward sees them again; see
:mod:`lightning_dist.pipeline.extrapolation` for what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_dist.pipeline.half_weights import HalfWeights
from lightning_dist.pipeline.weights import WeightVersion, version_bytes


class Predicted:
    """The forward sees weights as they will about be when its update is applied.

    Args:
        parameters: The stage's with their names, trainable or not.
        predict: Gives copies of the trainable ones as they will be some updates later.
        half: Casts these; None where layers compute in the parameters' own precision.
    """

    recomputes = False

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        predict: Callable[[int], Mapping[str, Tensor]],
        half: HalfWeights | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._half = half
        self._predict = predict
        self._copied_bytes: dict[WeightVersion, int] = {}
        self.num_steps = 0
        self._peak_stash_bytes = 0

    def acquire(self) -> WeightVersion:
        """Predicts over the updates of the micro-batches in flight."""
        # Nothing in flight: the next update is this micro-batch's own, after its backward.
        copies = self._predict(len(self._copied_bytes)) if self._copied_bytes else {}
        aliases = self._aliases(copies)
        version = WeightVersion(self.num_steps, aliases, num_users=1)
        self._copied_bytes[version] = sum(aliases[name].nbytes for name in copies)
        self._peak_stash_bytes = max(self._peak_stash_bytes, self.stash_bytes)
        return version

    def look(self) -> WeightVersion:
        """Gives the parameters as they are."""
        if self._half is None:
            return WeightVersion(self.num_steps)
        return WeightVersion(self.num_steps, self._aliases({}))

    def _aliases(self, copies: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: copies.get(name, p.data)
            .to(self._dtype_of(p))
            .detach()
            .requires_grad_(p.requires_grad)
            for name, p in self._parameters.items()
        }

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype if self._half is None else self._half.dtype_of(parameter)

    def release(self, version: WeightVersion) -> None:
        """Takes a version back."""
        del self._copied_bytes[version]

    def before_step(self) -> None:
        """Counts; what is in flight has weights of its own."""
        self.num_steps += 1

    def restart(self) -> None:
        """Does nothing."""

    @property
    def version_bytes(self) -> int:
        """Bytes of the copies for a micro-batch."""
        return version_bytes(self._parameters.values(), self._dtype_of)

    @property
    def stash_bytes(self) -> int:
        """Bytes held beyond the parameters."""
        return sum(self._copied_bytes.values())

    @property
    def peak_stash_bytes(self) -> int:
        """The most bytes held beyond the parameters."""
        return self._peak_stash_bytes

"""The policies that choose the weights for a micro-batch's forward and its backward.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`.Stashed`   the newest version, or one that    the version of its forward
                    all stages have (vertical sync)
:class:`Newest`     the newest version                 the newest version then
:class:`.Predicted` the newest version, extrapolated   the version of its forward
                    to the update of b
==================  =================================  ============================

In half precision with masters forwards and backwards see :class:`.CastWeights`, since no
micro-batch computes with the parameters themselves. Then synchronous schedules use
:class:`.Stashed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.schedules.update_rule import BackwardWeights, StageWeights
from lightning_dist.engine.stashing.half_versions import CastWeights, HalfWeights
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import (
    ComputeWeights,
    Stashed,
    WeightPolicy,
    WeightVersion,
)
from lightning_dist.engine.tensors.patch import has_gradient_hooks

Predict = Callable[[Mapping[str, nn.Parameter], int], Mapping[str, Tensor]]
"""Takes parameters by name and a number of updates; returns copies as of so many updates later."""


class Current(WeightPolicy):
    """Policy of synchronous schedules: nothing is written while a micro-batch is in flight.

    A micro-batch sees the parameters themselves, but aliases of those whose hooks autograd must not
    run for each micro-batch: the hooked ones of ``weights``.
    """

    @override
    def acquire(self) -> WeightVersion:
        named = self._weights.parameters.items()
        hooked = {n: p for n, p in named if p.requires_grad and has_gradient_hooks(p)}
        aliases = {name: p.data.requires_grad_() for name, p in hooked.items()}
        return WeightVersion(self.num_steps, aliases)


class Newest(WeightPolicy):
    """Keeps no version: a backward runs the layers again, on the newest weights.

    It only serves to study what stashing buys (PipeDream, section 3.3).

    Args:
        weights: The weights of the stage.
        remembers: Whether the trained weights of a forward are copied, for comparisons.
    """

    recomputes = True

    def __init__(self, weights: ComputeWeights, *, remembers: bool = False) -> None:
        super().__init__(weights)
        self._num_bytes = weights.num_bytes()
        self._remembers = remembers

    @property
    @override
    def version_bytes(self) -> int:
        return self._num_bytes

    @override
    def acquire(self) -> WeightVersion:
        aliases = self._weights.aliases()
        copies = {
            name: alias.detach().clone() if alias.requires_grad else alias
            for name, alias in (aliases.items() if self._remembers else ())
        }
        return WeightVersion(self.num_steps, aliases, copies=copies)


def choose_policy(
    layers: nn.Module,
    weights: StageWeights,
    predict: Predict | None = None,
    half: HalfWeights | None = None,
    *,
    remembers: bool = False,
    microbatches_per_update: int = 1,
    hides_hooks: bool = False,
) -> WeightPolicy:
    """Creates the policy by which a stage's micro-batches get their weights.

    Args:
        layers: Layers of the stage.
        weights: The weights that the update rule and the user's settings ask for.
        predict: Returns copies of the trainable parameters as they will be some updates later.
        half: How layers compute in half precision; None if they do not.
        remembers: Whether the weights of forwards are kept for comparisons.
        microbatches_per_update: Number of micro-batches that see the same predicted weights.
        hides_hooks: Whether autograd must not run hooks of parameters.
    """
    if half is not None and not half.casts(layers):
        half = None
    named = layers.named_parameters()
    computed = ComputeWeights(named) if half is None else CastWeights(named, half)
    if predict is not None:

        def predicted(num_updates: int) -> Mapping[str, Tensor]:
            # As of the call: users freeze and thaw parameters.
            trained = {name: p for name, p in layers.named_parameters() if p.requires_grad}
            return predict(trained, num_updates)

        return Predicted(computed, predicted, microbatches_per_update)
    if weights.of_backward is BackwardWeights.NEWEST:
        return Newest(computed, remembers=remembers)
    if weights.of_backward is BackwardWeights.UNCHANGED and half is None:
        return Current(computed if hides_hooks else ComputeWeights(()))
    return Stashed(computed, weights.age)

"""The policies that choose the weights for a micro-batch's forward and its backward.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`.Stashed`   the newest version, or one that    the version of its forward
                    all stages have (vertical sync)
:class:`Unstashed`  the newest version                 the newest version then
:class:`.Predicted` the newest version, extrapolated   the version of its forward
                    to the update of b
==================  =================================  ============================

In half precision with masters forwards and backwards see casts of these, since no micro-batch
computes with the parameters themselves. Then synchronous schedules use :class:`.StashedHalf`, and
:class:`.UnstashedHalf` replaces :class:`Unstashed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.schedules.update_rule import BackwardWeights, StageWeights
from lightning_dist.engine.stashing.half_versions import HalfWeights, StashedHalf, UnstashedHalf
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import Stashed, WeightPolicy, WeightVersion
from lightning_dist.engine.tensors.patch import has_gradient_hooks

Predict = Callable[[Mapping[str, nn.Parameter], int], Mapping[str, Tensor]]
"""Takes parameters by name and a number of updates; returns copies as of so many updates later."""
Parameters = Callable[[], Mapping[str, nn.Parameter]]


class Current(WeightPolicy):
    """Policy of synchronous schedules: nothing is written while a micro-batch is in flight.

    A micro-batch sees the parameters themselves, but aliases of hooked ones.

    Args:
        hooked: Returns the parameters whose hooks must not run for each micro-batch.
    """

    def __init__(self, hooked: Parameters = dict) -> None:
        super().__init__()
        self._hooked = hooked

    @override
    def acquire(self) -> WeightVersion:
        return WeightVersion(self.num_steps, self._aliases())

    def _aliases(self) -> Mapping[str, Tensor]:
        return {name: p.data.requires_grad_() for name, p in self._hooked().items()}


class Unstashed(Current):
    """Asynchronous policy without stashing: the backward sees other weights than its forward.

    The backward runs the layers again on the stashed input with the present weights, and
    differentiates that run. The policy only serves to study what stashing buys (PipeDream, section
    3.3).

    Args:
        remembered: Returns the parameters to copy at a forward, for comparisons.
        hooked: Returns the parameters whose hooks must not run for each micro-batch.
    """

    recomputes = True

    def __init__(self, remembered: Parameters, hooked: Parameters = dict) -> None:
        super().__init__(hooked)
        self._remembered = remembered

    @override
    def acquire(self) -> WeightVersion:
        copies = {name: p.detach().clone() for name, p in self._remembered().items()}
        return WeightVersion(self.num_steps, self._aliases(), copies=copies)


def choose_policy(
    layers: nn.Module,
    weights: StageWeights,
    predict: Predict | None,
    remembers: bool,
    half: HalfWeights | None = None,
    microbatches_per_update: int = 1,
    *,
    hides_hooks: bool = False,
) -> WeightPolicy:
    """Creates the policy by which a stage's micro-batches get their weights.

    Args:
        layers: Layers of the stage.
        weights: The weights that the update rule and the user's settings ask for.
        predict: Returns copies of the trainable parameters as they will be some updates later.
        remembers: Whether the weights of forwards are kept for comparisons.
        half: How layers compute in half precision; None if they do not.
        microbatches_per_update: Number of micro-batches that see the same predicted weights.
        hides_hooks: Whether autograd must not run hooks of parameters.
    """
    if half is not None and not half.casts(layers):
        half = None

    def trainable() -> dict[str, nn.Parameter]:  # as of the call: users freeze and thaw parameters
        return {name: p for name, p in layers.named_parameters() if p.requires_grad}

    named = list(layers.named_parameters())  # once: there are many micro-batches and modules

    def hooked() -> dict[str, nn.Parameter]:
        return {name: p for name, p in named if p.requires_grad and has_gradient_hooks(p)}

    hidden: Parameters = hooked if hides_hooks else dict
    if predict is not None:
        return Predicted(
            layers.named_parameters(),
            lambda num_updates: predict(trainable(), num_updates),
            microbatches_per_update,
            half,
        )
    if half is not None:
        if weights.of_backward is BackwardWeights.NEWEST:
            return UnstashedHalf(layers.named_parameters(), half, remembers=remembers)
        return StashedHalf(layers.named_parameters(), half, weights.age)
    if weights.of_backward is BackwardWeights.UNCHANGED:
        return Current(hidden)
    if weights.of_backward is BackwardWeights.NEWEST:
        return Unstashed(trainable if remembers else dict, hidden)
    return Stashed(layers.named_parameters(), weights.age)

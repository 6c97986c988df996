"""The policies that choose the weights for a micro-batch's forward and its backward.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`.Stashed`   the newest version, or one that    the version of its forward, or
                    all stages have (vertical sync)    the newest version then
:class:`.Predicted` the newest version, extrapolated   the version of its forward
                    to the update of b
==================  =================================  ============================

In half precision with masters forwards and backwards see casts of these, since no micro-batch
computes with the parameters themselves. Then synchronous schedules use :class:`.StashedHalf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.schedules.update_rule import BackwardWeights, StageWeights
from lightning_dist.engine.stashing.half_versions import HalfWeights, StashedHalf
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import Stashed, WeightPolicy, WeightVersion
from lightning_dist.engine.tensors.patch import has_gradient_hooks

Predict = Callable[[Mapping[str, nn.Parameter], int], Mapping[str, Tensor]]
"""Takes parameters by name and a number of updates; returns copies as of so many updates later."""


class Current(WeightPolicy):
    """Policy of synchronous schedules: nothing is written while a micro-batch is in flight.

    A micro-batch sees the parameters themselves, but aliases of hooked ones if autograd must not
    run their hooks for each micro-batch.
    """

    def __init__(self, layers: nn.Module, *, hides_hooks: bool) -> None:
        super().__init__()
        # Once: there are many micro-batches and modules.
        self._named = list(layers.named_parameters()) if hides_hooks else []

    @override
    def acquire(self) -> WeightVersion:
        hooked = {n: p for n, p in self._named if p.requires_grad and has_gradient_hooks(p)}
        aliases = {name: p.data.requires_grad_() for name, p in hooked.items()}
        return WeightVersion(self.num_steps, aliases)


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
    if predict is not None:

        def predicted(num_updates: int) -> Mapping[str, Tensor]:
            # As of the call: users freeze and thaw parameters.
            trained = {name: p for name, p in layers.named_parameters() if p.requires_grad}
            return predict(trained, num_updates)

        return Predicted(layers.named_parameters(), predicted, microbatches_per_update, half)
    if half is None and weights.of_backward is BackwardWeights.UNCHANGED:
        return Current(layers, hides_hooks=hides_hooks)
    recomputes = weights.of_backward is BackwardWeights.NEWEST
    named, age = layers.named_parameters(), weights.age
    if half is None:
        return Stashed(named, age, recomputes=recomputes, remembers=remembers)
    return StashedHalf(named, half, age, recomputes=recomputes, remembers=remembers)

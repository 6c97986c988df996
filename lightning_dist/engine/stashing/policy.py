"""The policies that choose the weights for a micro-batch's forward and its backward.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`Stashed`    the newest version, or one that    the version of its forward
                    all stages have (vertical sync)
:class:`Unstashed`  the newest version                 the newest version then
:class:`Predicted`  the newest version, extrapolated   the version of its forward
                    to the update of b
==================  =================================  ============================

In half precision with masters forwards and backwards see casts of these, since no micro-batch
computes with the parameters themselves. Then synchronous schedules use :class:`Stashed`, and
:class:`UnstashedHalf` replaces :class:`Unstashed`.

A stage asks its policy; the schedule decides which policy is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.schedules.update_rule import BackwardWeights, StageWeights
from lightning_dist.engine.stashing.half_versions import HalfWeights, HalfWeightStore
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import WeightStore, WeightVersion
from lightning_dist.engine.tensors.patch import has_gradient_hooks

Predict = Callable[[Mapping[str, nn.Parameter], int], Mapping[str, Tensor]]
"""Takes parameters by name and a number of updates; returns copies as of so many updates later."""
Parameters = Callable[[], Mapping[str, nn.Parameter]]


class WeightPolicy(Protocol):
    """Decides which weights a micro-batch sees."""

    recomputes: bool

    def acquire(self) -> WeightVersion:
        """Returns the weights for a forward; no aliases mean the parameters themselves."""

    def look(self) -> WeightVersion:
        """Returns the weights for a forward that has no backward."""

    def release(self, version: WeightVersion) -> None:
        """Releases weights from :meth:`acquire` after the backward."""

    def before_step(self) -> None:
        """Prepares for the optimizer's writes."""

    def restart(self) -> None:
        """Restarts with no micro-batch in flight, after a drain."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps seen: the index of the newest version."""

    @property
    def version_bytes(self) -> int:
        """Bytes of one version beyond the parameters."""

    @property
    def stash_bytes(self) -> int:
        """Bytes held beyond the parameters."""

    @property
    def peak_stash_bytes(self) -> int:
        """The most bytes held beyond the parameters."""


class Current:
    """Policy of synchronous schedules: nothing is written while a micro-batch is in flight.

    Args:
        hooked: Returns the parameters whose hooks must not run for each micro-batch.
    """

    recomputes = False
    version_bytes = 0
    stash_bytes = 0
    peak_stash_bytes = 0

    def __init__(self, hooked: Parameters = dict) -> None:
        self.num_steps = 0
        self._hooked = hooked

    def acquire(self) -> WeightVersion:
        """Returns the parameters themselves, but aliases of hooked ones."""
        return WeightVersion(self.num_steps, self._aliases())

    def _aliases(self) -> Mapping[str, Tensor]:
        return {name: p.data.requires_grad_() for name, p in self._hooked().items()}

    def look(self) -> WeightVersion:
        """Returns the parameters themselves."""
        return WeightVersion(self.num_steps)

    def release(self, version: WeightVersion) -> None:
        """Does nothing."""

    def before_step(self) -> None:
        """Counts the step."""
        self.num_steps += 1

    def restart(self) -> None:
        """Does nothing."""


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
        """Returns the parameters themselves, but aliases of hooked ones."""
        copies = {name: p.detach().clone() for name, p in self._remembered().items()}
        return WeightVersion(self.num_steps, self._aliases(), copies=copies)


class Stashed:
    """PipeDream's weight stashing: the backward sees the version of its forward.

    Args:
        store: Keeps the versions, and chooses the one for a forward.
    """

    recomputes = False

    def __init__(self, store: WeightStore) -> None:
        self.store = store

    def acquire(self) -> WeightVersion:
        """Returns the store's version for a forward."""
        return self.store.acquire()

    def look(self) -> WeightVersion:
        """Returns the newest weights."""
        return self.store.look()

    def release(self, version: WeightVersion) -> None:
        """Releases a version."""
        self.store.release(version)

    def before_step(self) -> None:
        """Moves the parameters to fresh memory if a micro-batch still uses the present memory."""
        self.store.before_step()

    def restart(self) -> None:
        """Restarts with the newest version."""
        self.store.restart()

    @property
    def num_steps(self) -> int:
        """Optimizer steps seen."""
        return self.store.num_steps

    @property
    def version_bytes(self) -> int:
        """Bytes of one version."""
        return self.store.version_bytes

    @property
    def stash_bytes(self) -> int:
        """Bytes held beyond the parameters."""
        return self.store.stash_bytes

    @property
    def peak_stash_bytes(self) -> int:
        """The most bytes held beyond the parameters."""
        return self.store.peak_stash_bytes


class UnstashedHalf(Stashed):
    """Policy like :class:`Unstashed`, on casts of masters.

    Args:
        store: Casts the newest version, once for each update.
        remembers: Whether a micro-batch keeps its forward's weights, for comparisons.
    """

    recomputes = True

    def __init__(self, store: HalfWeightStore, *, remembers: bool) -> None:
        super().__init__(store)
        self._remembers = remembers

    @override
    def acquire(self) -> WeightVersion:
        version = self.store.acquire()
        self.store.release(version)  # the backward uses another version
        copies = version.aliases if self._remembers else {}
        return WeightVersion(version.index, version.aliases, copies=copies)

    @override
    def release(self, version: WeightVersion) -> None:
        """Does nothing."""


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
        store = HalfWeightStore(layers.named_parameters(), half, weights.age)
        is_newest = weights.of_backward is BackwardWeights.NEWEST
        return UnstashedHalf(store, remembers=remembers) if is_newest else Stashed(store)
    if weights.of_backward is BackwardWeights.UNCHANGED:
        return Current(hidden)
    if weights.of_backward is BackwardWeights.NEWEST:
        return Unstashed(trainable if remembers else dict, hidden)
    return Stashed(WeightStore(layers.named_parameters(), weights.age))

"""Which weights a micro-batch's forward and its backward see.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`Stashed`    the newest version, or one that    the version of its forward
                    all stages have (vertical sync)
:class:`Unstashed`  the newest version                 the newest version then
:class:`Predicted`  what the optimizer will about      the version of its forward
                    make of it until its update
==================  =================================  ============================

In half precision with masters forwards and backwards see casts of these. Synchronous schedules are
:class:`Stashed` then, and :class:`UnstashedHalf` stands for :class:`Unstashed`, for parameters
themselves are what nobody computes with.

A stage asks its policy; the schedule decides which policy is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.schedules.schedule import UpdateRule
from lightning_dist.engine.stashing.half_versions import HalfWeights, HalfWeightStore
from lightning_dist.engine.stashing.prediction import Predicted
from lightning_dist.engine.stashing.versions import WeightStore, WeightVersion
from lightning_dist.engine.tensors.patch import has_gradient_hooks

WeightVersions = Literal["stash", "vertical_sync", "none"]
Predict = Callable[[Mapping[str, nn.Parameter], int], Mapping[str, Tensor]]
"""Takes parameters by name and a number of updates."""
Parameters = Callable[[], Mapping[str, nn.Parameter]]


class WeightPolicy(Protocol):
    """Decides which weights a micro-batch sees."""

    recomputes: bool

    def acquire(self) -> WeightVersion:
        """Gives the weights for a forward; no aliases stand for the parameters themselves."""

    def look(self) -> WeightVersion:
        """Gives the weights for a forward that has no backward."""

    def release(self, version: WeightVersion) -> None:
        """Takes them back after the backward."""

    def before_step(self) -> None:
        """Prepares for the optimizer's writes."""

    def restart(self) -> None:
        """Notes that nothing is in flight, after a drain."""

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
    """Synchronous schedules: nothing is written while a micro-batch is in flight.

    Args:
        hooked: Gives the parameters whose hooks must not run for each micro-batch.
    """

    recomputes = False
    version_bytes = 0
    stash_bytes = 0
    peak_stash_bytes = 0

    def __init__(self, hooked: Parameters = dict) -> None:
        self.num_steps = 0
        self._hooked = hooked

    def acquire(self) -> WeightVersion:
        """Gives the parameters themselves, but for hooked ones."""
        return WeightVersion(self.num_steps, self._aliases())

    def _aliases(self) -> Mapping[str, Tensor]:
        return {name: p.data.requires_grad_() for name, p in self._hooked().items()}

    def look(self) -> WeightVersion:
        """Gives the parameters themselves."""
        return WeightVersion(self.num_steps)

    def release(self, version: WeightVersion) -> None:
        """Does nothing."""

    def before_step(self) -> None:
        """Counts."""
        self.num_steps += 1

    def restart(self) -> None:
        """Does nothing."""


class Unstashed(Current):
    """Asynchronous without stashing: the backward sees weights that its forward did not.

    The backward runs the layers again on the stashed input with the weights of that moment, and
    differentiates that. Only to study what stashing buys (PipeDream, section 3.3).

    Args:
        remembered: Gives the parameters to copy at a forward, for comparisons.
        hooked: As for :class:`Current`.
    """

    recomputes = True

    def __init__(self, remembered: Parameters, hooked: Parameters = dict) -> None:
        super().__init__(hooked)
        self._remembered = remembered

    @override
    def acquire(self) -> WeightVersion:
        """Gives the parameters themselves, but for hooked ones."""
        copies = {name: p.detach().clone() for name, p in self._remembered().items()}
        return WeightVersion(self.num_steps, self._aliases(), copies=copies)


class Stashed:
    """PipeDream's weight stashing: the backward sees the version of its forward.

    Args:
        store: The versions; it decides which one a forward gets.
    """

    recomputes = False

    def __init__(self, store: WeightStore) -> None:
        self.store = store

    def acquire(self) -> WeightVersion:
        """Gives the newest version."""
        return self.store.acquire()

    def look(self) -> WeightVersion:
        """Gives the newest weights."""
        return self.store.look()

    def release(self, version: WeightVersion) -> None:
        """Takes a version back."""
        self.store.release(version)

    def before_step(self) -> None:
        """Moves the parameters to fresh memory where a micro-batch still uses the present one."""
        self.store.before_step()

    def restart(self) -> None:
        """Makes the next forward use the newest version."""
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
    """What :class:`Unstashed` is, on casts of masters.

    Args:
        store: Casts the newest version, once for each update.
        remembers: Whether a micro-batch keeps what its forward saw, for comparisons.
    """

    recomputes = True

    def __init__(self, store: HalfWeightStore, *, remembers: bool) -> None:
        super().__init__(store)
        self._remembers = remembers

    @override
    def acquire(self) -> WeightVersion:
        version = self.store.acquire()
        self.store.release(version)  # nobody waits for its backward
        copies = version.aliases if self._remembers else {}
        return WeightVersion(version.index, version.aliases, copies=copies)

    @override
    def release(self, version: WeightVersion) -> None:
        """Does nothing."""


def choose_policy(
    layers: nn.Module,
    stage: int,
    update_rule: UpdateRule,
    versions: WeightVersions,
    predict: Predict | None,
    remembers: bool,
    half: HalfWeights | None = None,
    microbatches_per_update: int = 1,
    *,
    hides_hooks: bool = False,
) -> WeightPolicy:
    """Gives the policy that a schedule and a user ask for.

    Args:
        layers: Of the stage.
        stage: Its number.
        update_rule: The schedule's.
        versions: Which weights an asynchronous backward sees.
        predict: Gives copies of the trainable parameters as they will be some updates later.
        remembers: Whether what forwards have seen can be compared later.
        half: How layers compute in half precision; None where they do not.
        microbatches_per_update: Of those that see the same weights.
        hides_hooks: Whether autograd shall not run hooks of parameters.
    """
    # What stage s has is s updates newer than what the first one has for the same minibatch,
    # unless updates come in the same round everywhere.
    is_apart = update_rule is UpdateRule.EACH
    age = stage if is_apart and versions == "vertical_sync" else 0
    if half is not None and not half.casts(layers):
        half = None

    def trainable() -> dict[str, nn.Parameter]:  # now: they may be frozen and thawed
        return {name: p for name, p in layers.named_parameters() if p.requires_grad}

    named = list(layers.named_parameters())  # once: micro-batches are many, and so may modules be

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
        store = HalfWeightStore(layers.named_parameters(), half, age)
        return UnstashedHalf(store, remembers=remembers) if versions == "none" else Stashed(store)
    if update_rule is UpdateRule.FLUSHED:
        return Current(hidden)
    if versions == "none":
        return Unstashed(trainable if remembers else dict, hidden)
    return Stashed(WeightStore(layers.named_parameters(), age))

"""Which weights a micro-batch's forward and its backward see.

==================  =================================  ============================
policy              forward of b                       backward of b
==================  =================================  ============================
:class:`Current`    the parameters themselves          the same (nothing moved)
:class:`Stashed`    the newest version, or one that    the version of its forward
                    all stages have (vertical sync)
:class:`Unstashed`  the newest version                 the newest version then
==================  =================================  ============================

A stage asks its policy; the schedule decides which policy is needed.
"""

from __future__ import annotations

from typing import Protocol

from lightning_dist.pipeline.weights import WeightStore, WeightVersion


class WeightPolicy(Protocol):
    """Decides which weights a micro-batch sees."""

    recomputes: bool

    def acquire(self) -> WeightVersion | None:
        """Gives the weights for a forward; None stands for the parameters themselves."""

    def release(self, version: WeightVersion | None) -> None:
        """Takes them back after the backward."""

    def before_step(self) -> None:
        """Prepares for the optimizer's writes."""

    def restart(self) -> None:
        """Notes that nothing is in flight, after a drain."""

    @property
    def peak_stash_bytes(self) -> int:
        """The most bytes held beyond the parameters."""


class Current:
    """Synchronous schedules: nothing is written while a micro-batch is in flight."""

    recomputes = False
    peak_stash_bytes = 0

    def acquire(self) -> None:
        """Gives the parameters themselves."""

    def release(self, version: WeightVersion | None) -> None:
        """Does nothing."""

    def before_step(self) -> None:
        """Does nothing."""

    def restart(self) -> None:
        """Does nothing."""


class Unstashed(Current):
    """Asynchronous without stashing: the backward sees weights that its forward did not.

    The backward runs the layers again on the stashed input with the weights of that moment, and
    differentiates that. Only to study what stashing buys (PipeDream, section 3.3).
    """

    recomputes = True


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

    def release(self, version: WeightVersion | None) -> None:
        """Takes a version back."""
        assert version is not None
        self.store.release(version)

    def before_step(self) -> None:
        """Moves the parameters to fresh memory where a micro-batch still uses the present one."""
        self.store.before_step()

    def restart(self) -> None:
        """Makes the next forward use the newest version."""
        self.store.restart()

    @property
    def peak_stash_bytes(self) -> int:
        """The most bytes held beyond the parameters."""
        return self.store.peak_stash_bytes

"""Asynchronous schedules that the package does not have: a class and a family each.

So tests can tell whether anything but its rule has to know an asynchronous schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from lightning_dist.engine.schedules import orders, registry
from lightning_dist.engine.schedules.family import MicrobatchRule, ScheduleFamily
from lightning_dist.engine.schedules.update_rule import UpdateRule


@dataclass(frozen=True, slots=True)
class TripleBufferedUpdate(UpdateRule):
    """Comes after the forwards of two more batches; half the micro-batches of 2BW suffice."""

    is_joint: ClassVar[bool] = True

    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class PerBatchUpdate(UpdateRule):
    """PipeDream on batches of several micro-batches: as late on a stage as its backwards need."""

    is_joint: ClassVar[bool] = False

    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        return -(-(num_ranks - 1 - rank) // num_microbatches)


TRIPLE = ScheduleFamily(
    "triple",
    orders.one_forward_one_backward,
    update_rule=TripleBufferedUpdate(),
    microbatch_rule=MicrobatchRule(
        lambda num_ranks, count: 2 * count >= num_ranks - 1, "two batches fill the ranks"
    ),
)
PER_BATCH = ScheduleFamily(
    "per_batch", orders.one_forward_one_backward, update_rule=PerBatchUpdate()
)


def add_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the families known by their names."""
    families = {**registry.FAMILIES, TRIPLE.name: TRIPLE, PER_BATCH.name: PER_BATCH}
    monkeypatch.setattr(registry, "FAMILIES", families)

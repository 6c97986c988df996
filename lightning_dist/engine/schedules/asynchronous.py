"""The asynchronous schedules: what an update means in each, and their families.

The order of work is 1F1B's, without the flush between batches. What differs is the update rule. A
new asynchronous schedule is a rule and a family, both in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lightning_dist.engine.schedules.family import MicrobatchRule, ScheduleFamily
from lightning_dist.engine.schedules.orders import one_forward_one_backward
from lightning_dist.engine.schedules.update_rule import UpdateRule


@dataclass(frozen=True, slots=True)
class PerBackwardUpdate(UpdateRule):
    """An update of a stage after each of its backwards (SOSP 2019, section 3.2).

    A batch meets weights that are ``n - 1 - r`` updates old on rank ``r``, as many as there are
    batches in flight behind it. Its backward uses the same weights (weight stashing, section 3.3).
    When the first stage updates for a batch, the last stage has done so long ago. So each stage
    clips by the norm of its own gradients and skips its own updates, and no weight can be tied.
    """

    is_joint: ClassVar[bool] = False
    splits_batches: ClassVar[bool] = False

    @override
    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        return num_ranks - 1 - rank


@dataclass(frozen=True, slots=True)
class DoubleBufferedUpdate(UpdateRule):
    """An update after the next batch's forwards, on all stages alike (ICML 2021, section 3.1).

    Each batch meets the version before the newest, so two versions suffice: ``w[t+1] = w[t] - lr *
    gradient(w[t-1])``. A batch needs at least as many micro-batches as there are stages after the
    first. Otherwise the gradients of its predecessor are not complete when they are due.
    """

    is_joint: ClassVar[bool] = True

    @override
    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        return 1


_AHEAD = MicrobatchRule(
    lambda num_ranks, count: count >= num_ranks - 1,
    "with fewer than the ranks after the first, a batch would need weights that its predecessor"
    " has not yet made",
)

ASYNCHRONOUS = (
    ScheduleFamily("pipedream", one_forward_one_backward, update_rule=PerBackwardUpdate()),
    ScheduleFamily(
        "pipedream_2bw",
        one_forward_one_backward,
        update_rule=DoubleBufferedUpdate(),
        microbatch_rule=_AHEAD,
    ),
)
"""The asynchronous kinds of schedules, in the order in which they are listed to users."""

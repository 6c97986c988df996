"""What a schedule's update means: when it comes on each rank, and what follows from that.

A rule names the delay of an update on each rank, in batches, and whether all stages update
together. From these two follow the places of the updates in a schedule, the weights that a batch
uses, and whether stages can agree about an update. Other modules ask for these facts, and never
which rule they have. Under each rule an update uses the hyperparameters of its own batch, and an
update that is skipped makes a version of the weights all the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Literal

from typing_extensions import override

from lightning_dist.engine.schedules.actions import Action, ActionKind

WeightVersions = Literal["stash", "vertical_sync", "none"]
_MICROBATCHES_PER_RANK = 4


class BackwardWeights(StrEnum):
    """The weights that a micro-batch's backward uses."""

    UNCHANGED = "unchanged"
    """Those of its forward: no update comes in between."""
    STASHED = "stashed"
    """Those of its forward, kept over the updates in between."""
    NEWEST = "newest"
    """The newest ones, other than those of its forward."""


@dataclass(frozen=True, slots=True)
class StageWeights:
    """The weights that the batches use on a stage.

    Attributes:
        of_backward: The weights of a backward.
        age: Number of versions by which the weights of a forward are behind the newest.
    """

    of_backward: BackwardWeights = BackwardWeights.UNCHANGED
    age: int = 0


@dataclass(frozen=True, slots=True)
class UpdateRule(ABC):
    """The meaning of a schedule's update; asynchronous unless a subclass says otherwise.

    A rank of an asynchronous schedule has one stage. In all methods ``rank`` is the index of a rank
    among the pipeline's ``num_ranks``, and a batch has ``num_microbatches``.

    Attributes:
        is_asynchronous: Whether the pipeline is not flushed between batches, so that batches
            overlap and weights are stale.
        is_joint: Whether all stages apply a batch's update in the same round, so that each batch
            meets the same version on all stages. Only then the stages can agree about an update: a
            norm of the whole gradient, a vote on skipping, the sum of a tied weight's gradients.
        splits_batches: Whether a batch is split into micro-batches. Otherwise each batch is one
            micro-batch, and a schedule's micro-batches are batches.
    """

    is_asynchronous: ClassVar[bool] = True
    is_joint: ClassVar[bool]
    splits_batches: ClassVar[bool] = True

    @abstractmethod
    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        """Returns the number of batches between a batch and its update on a rank."""

    def lag(self, num_ranks: int, num_microbatches: int) -> int:
        """Returns the largest delay, by which the first rank may be ahead of the last's results."""
        return max(self.delay(rank, num_ranks, num_microbatches) for rank in range(num_ranks))

    def default_microbatches(self, num_ranks: int) -> int:
        """Returns the default number of micro-batches per batch, on a number of ranks."""
        return num_ranks if self.splits_batches else 1

    def steady_batches(self, num_stages: int, num_microbatches: int) -> int:
        """Returns the number of batches after which each rank's rounds repeat."""
        return 1 + 2 * num_stages // num_microbatches

    @property
    def completes_early(self) -> bool:
        """Whether gradients are final before their update is due; see ICML 2021, section 3.1.

        The first stage has a batch's gradients last. Stages that update together do not wait for
        it: their update comes later, and sums, norms and votes are sent meanwhile.
        """
        return self.is_asynchronous and self.is_joint

    def weights(
        self, versions: WeightVersions, rank: int, num_ranks: int, num_microbatches: int
    ) -> StageWeights:
        """Returns the weights that the batches use on a rank's stage, by the user's choice."""
        # Under vertical sync each stage uses the first stage's version (SOSP 2019, section 3.3).
        if versions == "none":
            return StageWeights(BackwardWeights.NEWEST)
        age = 0
        if versions == "vertical_sync":
            own = self.delay(rank, num_ranks, num_microbatches)
            age = self.lag(num_ranks, num_microbatches) - own
        return StageWeights(BackwardWeights.STASHED, age)

    def add_updates(
        self, actions: Sequence[Action], rank: int, num_ranks: int, num_microbatches: int
    ) -> Iterator[Action]:
        """Adds a reduction where gradients are final, and an update where it is due.

        An update is due when its delay's batches have run their forwards, after the backward that
        is paired with the last of these. In a drain no forward follows, so each update is due when
        its gradients are complete. The reduction is next to the update, unless gradients
        are final before.
        """
        # Forwards from the first of an update's batch until the update.
        span = num_microbatches * (1 + self.delay(rank, num_ranks, num_microbatches))
        num_forwards = sum(action.kind is ActionKind.FORWARD for action in actions)
        forwards = complete = due = 0
        for action in actions:
            yield action
            forwards += action.kind is ActionKind.FORWARD
            if not action.kind.ends_backward:
                continue
            if (action.microbatch_index + 1) % num_microbatches == 0:
                if self.completes_early:
                    yield Action(action.stage_index, ActionKind.REDUCE_GRAD, complete)
                complete += 1
            while due < complete and forwards >= min(due * num_microbatches + span, num_forwards):
                step = Action(action.stage_index, ActionKind.STEP, due)
                if not self.completes_early:
                    yield replace(step, kind=ActionKind.REDUCE_GRAD)
                yield step
                due += 1


@dataclass(frozen=True, slots=True)
class FlushedUpdate(UpdateRule):
    """An update after each batch, when the pipeline is empty.

    The weights are never stale. All synchronous schedules have this rule, PipeDream-Flush (ICML
    2021, section 3.2) under the name of ``1f1b``.
    """

    is_asynchronous: ClassVar[bool] = False
    is_joint: ClassVar[bool] = True

    @override
    def delay(self, rank: int, num_ranks: int, num_microbatches: int) -> int:
        return 0

    @override
    def default_microbatches(self, num_ranks: int) -> int:
        # A bubble of a fifth under 1F1B; a single rank waits for no other.
        return _MICROBATCHES_PER_RANK * num_ranks if num_ranks > 1 else 1

    @override
    def steady_batches(self, num_stages: int, num_microbatches: int) -> int:
        return 1

    @override
    def weights(
        self, versions: WeightVersions, rank: int, num_ranks: int, num_microbatches: int
    ) -> StageWeights:
        return StageWeights()

    @override
    def add_updates(
        self, actions: Sequence[Action], rank: int, num_ranks: int, num_microbatches: int
    ) -> Iterator[Action]:
        yield from actions
        stages = sorted({action.stage_index for action in actions})
        yield from (Action(stage, ActionKind.REDUCE_GRAD, 0) for stage in stages)
        yield from (Action(stage, ActionKind.STEP, 0) for stage in stages)


FLUSHED = FlushedUpdate()

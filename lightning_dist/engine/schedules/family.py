"""A family of schedules: an order of work and a placement of stages, for all sizes that fit.

All that other modules must know of a schedule is in its family, so none of them asks for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_dist.engine.schedules.actions import Action
from lightning_dist.engine.schedules.schedule import Schedule
from lightning_dist.engine.schedules.update_rule import FLUSHED, UpdateRule


@dataclass(frozen=True, slots=True)
class RankStages:
    """One rank's place in a pipeline; its stages are in ascending order."""

    rank: int
    num_ranks: int
    stages: tuple[int, ...]


Order = Callable[[RankStages, int], Iterator[Action]]
"""Takes a rank's place and the number of micro-batches; yields the rank's actions in order."""
Placement = Callable[[int, int], tuple[int, ...]]
"""Takes the numbers of ranks and of stages per rank; returns the rank of each stage."""


def round_robin(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the placement of stage ``s`` on rank ``s % num_ranks``; see :data:`Placement`."""
    return tuple(range(num_ranks)) * stages_per_rank


def stages_of_rank(rank_of_stage: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns the stages of a rank, in ascending order."""
    return tuple(stage for stage, home in enumerate(rank_of_stage) if home == rank)


def ranks_from(
    order: Order, rank_of_stage: tuple[int, ...], count: int, only_rank: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Returns each rank's actions for ``count`` micro-batches; or those of ``only_rank``."""
    num_ranks = max(rank_of_stage) + 1

    def of_rank(rank: int) -> tuple[Action, ...]:
        if only_rank not in (None, rank):
            return ()
        return tuple(order(RankStages(rank, num_ranks, stages_of_rank(rank_of_stage, rank)), count))

    return tuple(map(of_rank, range(num_ranks)))


@dataclass(frozen=True, slots=True)
class MicrobatchRule:
    """The numbers of micro-batches that a family takes.

    Attributes:
        fits: Takes the numbers of ranks and of a batch's micro-batches; returns whether they fit.
        text: The rule in words, for messages.
    """

    fits: Callable[[int, int], bool] = lambda num_ranks, count: True
    text: str = "any number will do"

    def nearest(self, num_ranks: int, count: int) -> list[int]:
        """Returns the fitting numbers next to one that does not fit, below and above."""
        below = next((c for c in range(count - 1, 0, -1) if self.fits(num_ranks, c)), None)
        above = next(c for c in range(count + 1, count + 2 + num_ranks) if self.fits(num_ranks, c))
        return [above] if below is None else [below, above]


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A family of schedules: one kind, for many sizes.

    In all methods ``num_stages`` and ``num_ranks`` are those of the pipeline, ``rank_of_stage`` has
    the rank of each stage, ``stages_per_rank=None`` takes the fewest stages, and ``num_batches``
    counts the batches between two drains, of ``num_microbatches`` each.

    Attributes:
        name: Name of the family.
        order: Yields one rank's actions in order.
        place: Returns the rank of each stage.
        fewest_stages: Smallest number of stages per rank.
        most_stages: Largest number of stages per rank; None for any number.
        update_rule: The meaning of an update.
        microbatch_rule: The numbers of micro-batches that fit.
    """

    name: str
    order: Order
    place: Placement = round_robin
    fewest_stages: int = 1
    most_stages: int | None = 1
    update_rule: UpdateRule = FLUSHED
    microbatch_rule: MicrobatchRule = MicrobatchRule()

    def num_ranks(self, num_stages: int, stages_per_rank: int | None = None) -> int:
        """Returns the number of ranks of a pipeline.

        Raises:
            ValueError: The stages cannot be distributed evenly.
        """
        per_rank = self.fewest_stages if stages_per_rank is None else stages_per_rank
        if num_stages % per_rank:
            raise ValueError(
                f"num_stages={num_stages} must be a multiple of the stages per rank ({per_rank}) of"
                f" schedule={self.name!r}."
            )
        return num_stages // per_rank

    def rank_of_stage(self, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """Returns the rank of each stage.

        Raises:
            ValueError: The family takes another number of stages per rank.
        """
        count = self.fewest_stages if stages_per_rank is None else stages_per_rank
        if count < self.fewest_stages or count > (self.most_stages or count):
            takes = f"{self.fewest_stages}" + (" or more" if self.most_stages is None else "")
            raise ValueError(
                f"stages_per_rank={count} does not go with schedule={self.name!r}, which takes"
                f" {takes}."
            )
        return self.place(num_ranks, count)

    def default_microbatches(self, num_ranks: int) -> int:
        """Returns the default number of micro-batches on a number of ranks."""
        return self.update_rule.default_microbatches(num_ranks)

    def check_microbatches(self, num_ranks: int, count: int) -> None:
        """Checks the number of micro-batches of a batch.

        Raises:
            ValueError: The family takes other numbers; the message names the nearest.
        """
        if not self.microbatch_rule.fits(num_ranks, count):
            nearest = self.microbatch_rule.nearest(num_ranks, count)
            raise ValueError(
                f"num_microbatches={count} does not go with schedule={self.name!r} on {num_ranks}"
                f" ranks: {self.microbatch_rule.text}. Use {' or '.join(map(str, nearest))}."
            )

    def microbatches_of(self, num_ranks: int, batch_size: int, most: int) -> int:
        """Returns into how many micro-batches a batch of some samples is cut.

        As many as allowed, but of two samples at least, if the schedule can: code that takes a
        batch for more than one sample, such as ``logits.squeeze()``, does something else with one.
        """
        for limit in (batch_size // 2, batch_size):
            counts = range(min(most, limit), 0, -1)
            found = next((c for c in counts if self.microbatch_rule.fits(num_ranks, c)), None)
            if found is not None:
                return found
        return min(most, batch_size)

    def build(
        self,
        rank_of_stage: tuple[int, ...],
        num_microbatches: int,
        num_batches: int = 1,
        only_rank: int | None = None,
    ) -> Schedule:
        """Builds a schedule of compute actions, of all ranks or of one; see :func:`ranks_from`."""
        count = num_microbatches * num_batches
        return Schedule(
            self.name,
            num_stages=len(rank_of_stage),
            num_microbatches=count,
            ranks=ranks_from(self.order, rank_of_stage, count, only_rank),
            update_rule=self.update_rule,
            num_batches=num_batches,
        )

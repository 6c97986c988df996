"""Finds the family of a schedule by the name that a user gives, and builds its schedules.

The families are in :mod:`.schedules.orders`, :mod:`.schedules.asynchronous` and
:mod:`.schedules.csv_file`; docs/schedules.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from lightning_dist.engine.schedules.asynchronous import ASYNCHRONOUS
from lightning_dist.engine.schedules.csv_file import ScheduleFile, read_schedule
from lightning_dist.engine.schedules.family import ScheduleFamily, ranks_from, stages_of_rank
from lightning_dist.engine.schedules.orders import SYNCHRONOUS, forward_only
from lightning_dist.engine.schedules.schedule import Schedule

_FILE = "file:"

FAMILIES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {family.name: family for family in SYNCHRONOUS + ASYNCHRONOUS}
)
SCHEDULE_NAMES = tuple(FAMILIES)


def find_family(name: str) -> ScheduleFamily:
    """Returns the family of a schedule's name, or of ``"file:"`` and the path of a CSV file.

    Raises:
        ValueError: There is no schedule of that name, or the file cannot be read or executed.
    """
    if name.startswith(_FILE):
        schedule = read_schedule(name.removeprefix(_FILE))
        return ScheduleFile(name, lambda own, _: iter(schedule.ranks[own.rank]), schedule=schedule)
    if name not in FAMILIES:
        near = get_close_matches(name.casefold(), FAMILIES)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"schedule={name!r} is unknown.{meant} Use one of {list(FAMILIES)},"
            " or 'file:my_schedule.csv'."
        )
    return FAMILIES[name]


def build_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    num_batches: int = 1,
) -> Schedule:
    """Builds a schedule of compute actions; :func:`.lower` adds what is sent and updated.

    Args:
        name: One of :data:`SCHEDULE_NAMES`, or ``"file:"`` and the path of a CSV file.
        num_stages: Number of stages of the pipeline, on all ranks together.
        num_microbatches: Number of micro-batches per batch; for ``"pipedream"`` between two drains.
        stages_per_rank: Number of stages on each rank; None takes the fewest that are possible.
        num_batches: Number of batches between two drains, for ``"pipedream_2bw"``.

    Raises:
        ValueError: The name is unknown, or there is no such schedule for the sizes.
    """
    sizes = (num_stages, num_microbatches, num_batches, stages_per_rank)
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches},"
            f" stages_per_rank={stages_per_rank} and num_batches={num_batches} must be at least 1."
        )
    family = find_family(name)
    num_ranks = family.num_ranks(num_stages, stages_per_rank)
    family.check_microbatches(num_ranks, num_microbatches)
    rank_of_stage = family.rank_of_stage(num_ranks, stages_per_rank)
    return family.build(rank_of_stage, num_microbatches, num_batches)


def build_forward_schedule(
    rank_of_stage: tuple[int, ...], num_microbatches: int, only_rank: int | None = None
) -> Schedule:
    """Builds a schedule without backwards for a batch to evaluate; see :func:`ranks_from`."""
    ranks = ranks_from(forward_only, rank_of_stage, num_microbatches, only_rank)
    return Schedule(
        "forward", num_stages=len(rank_of_stage), num_microbatches=num_microbatches, ranks=ranks
    )


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """One rank's part of a pipeline.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Number of micro-batches per batch; 1 for ``"pipedream"``.
        layers_per_stage: The partition.
        rank: This rank's index in the pipeline.
        stages_per_rank: Number of stages on each rank.
        keeps_pairs: Whether a batch is cut into fewer micro-batches, so that each has two samples.
        replica_index: Index of this rank's data replica, for the random numbers only.
    """

    schedule: str
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    rank: int
    stages_per_rank: int = 1
    keeps_pairs: bool = False
    replica_index: int = 0

    @property
    def family(self) -> ScheduleFamily:
        """The family of the schedule."""
        return find_family(self.schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.layers_per_stage)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.family.rank_of_stage(self.num_ranks, self.stages_per_rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages, in ascending order."""
        return stages_of_rank(self.rank_of_stage, self.rank)

    def build(self, num_batches: int | None = None, only_rank: int | None = None) -> Schedule:
        """Builds the schedule of compute actions, of all ranks or of one; see :func:`ranks_from`.

        Without a number of batches it has as many as it takes until the rounds repeat.
        """
        if num_batches is None:
            rule = self.family.update_rule
            num_batches = rule.steady_batches(self.num_stages, self.num_microbatches)
        sizes = self.num_microbatches, num_batches
        return self.family.build(self.rank_of_stage, *sizes, only_rank)

"""Schedules in files: a row per rank, an action per cell, as torch writes and reads them.

``torch.distributed.pipelining`` writes its schedules so, with or without communication. Actions
other than forwards and backwards follow from the rest and are left out here. Blank cells show
readers a pause, and mean nothing.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.family import ScheduleFamily
from lightning_dist.engine.schedules.schedule import Schedule, ScheduleError

# Further actions of torch's lowered schedules, for communication and for sharded parameters.
_DERIVED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


@dataclass(frozen=True, slots=True)
class ScheduleFile(ScheduleFamily):
    """A schedule from a file, which determines the sizes; smaller batches have fewer micro-batches.

    Attributes:
        schedule: The schedule in the file.
    """

    schedule: Schedule = field(kw_only=True)

    @override
    def num_ranks(self, num_stages: int, stages_per_rank: int | None = None) -> int:
        if num_stages != self.schedule.num_stages:
            raise self._refusal(f"num_stages={num_stages}", f"{self.schedule.num_stages}")
        return len(self.schedule.ranks)

    @override
    def rank_of_stage(self, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        found = self.schedule.rank_of_stage
        per_rank = set(Counter(found).values())
        if len(per_rank) > 1:
            raise ValueError(
                f"schedule={self.name!r} has ranks with different numbers of stages: the ranks of"
                f" its stages are {list(found)}. Give each rank as many."
            )
        if num_ranks != len(self.schedule.ranks):
            raise ValueError(
                f"schedule={self.name!r} has {len(self.schedule.ranks)} rows, one for each rank of"
                f" the pipeline, but the pipeline has {num_ranks}."
            )
        if stages_per_rank is not None and stages_per_rank * num_ranks != len(found):
            has = f"{len(found)} stages on {num_ranks} ranks"
            raise self._refusal(f"stages_per_rank={stages_per_rank}", has)
        return found

    @override
    def default_microbatches(self, num_ranks: int) -> int:
        return self.schedule.num_microbatches

    @override
    def check_microbatches(self, num_ranks: int, count: int) -> None:
        if count != self.schedule.num_microbatches:
            has = f"{self.schedule.num_microbatches}"
            raise self._refusal(f"num_microbatches={count}", has)

    def _refusal(self, asked: str, has: str) -> ValueError:
        return ValueError(
            f"{asked} does not go with schedule={self.name!r}, which has {has}. Leave it out."
        )

    @override
    def microbatches_of(self, num_ranks: int, batch_size: int, most: int) -> int:
        if batch_size >= most:
            return most  # of one sample, too, since the file says so
        return ScheduleFamily.microbatches_of(self, num_ranks, batch_size, most)

    @override
    def build(
        self,
        rank_of_stage: tuple[int, ...],
        num_microbatches: int,
        num_batches: int = 1,
        only_rank: int | None = None,
    ) -> Schedule:
        """Returns the file's order; for fewer micro-batches, without those that are missing."""
        ranks = tuple(
            tuple(action for action in actions if action.microbatch_index < num_microbatches)
            for actions in self.schedule.ranks
        )
        return replace(self.schedule, num_microbatches=num_microbatches, ranks=ranks)


def read_schedule(path: str | Path) -> Schedule:
    """Reads and validates a schedule with cells like ``0F0``, ``0B0``, ``0I0`` and ``0W0``.

    A path may begin with ``~``.

    Raises:
        ValueError: The file cannot be read, a cell is no action, or the schedule cannot be
            executed.
    """
    try:
        with open(os.path.expanduser(path), newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"The schedule {str(path)!r} cannot be read: {error}.") from error
    ranks = tuple(tuple(_actions(path, rank, row)) for rank, row in enumerate(rows))
    everything = [action for actions in ranks for action in actions]
    if not everything:
        raise ValueError(f"The schedule {str(path)!r} has no actions.")
    if all(action.kind is ActionKind.FORWARD for action in everything):
        raise ValueError(
            f"The schedule {str(path)!r} has no backwards, so it trains nothing. Write them as 0B0,"
            " or 0I0 and 0W0."
        )
    num_stages = 1 + max(action.stage_index for action in everything)
    num_microbatches = 1 + max(action.microbatch_index for action in everything)
    try:
        return Schedule(Path(path).name, num_stages, num_microbatches, ranks).validate()
    except ScheduleError as error:
        raise ScheduleError(f"The schedule {str(path)!r} cannot be executed. {error}") from error


def _actions(path: str | Path, rank: int, row: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(row):
        text = cell.strip()
        if not text or _DERIVED.fullmatch(text):
            continue
        try:
            action = Action.parse(text)
        except ValueError:
            action = None
        if action is None or not action.kind.is_compute:
            kinds = [kind.value for kind in ActionKind if kind.is_compute]
            raise ValueError(
                f"The schedule {str(path)!r}, row {rank + 1}, cell {column + 1}: {text!r} is not an"
                " action of a file. Write stage, kind and micro-batch, like '2F0', with one of the"
                f" kinds {kinds}. What is sent and updated follows from these."
            )
        yield action

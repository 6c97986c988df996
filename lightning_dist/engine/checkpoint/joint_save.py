"""A save that succeeds on all ranks or on none.

After each step the ranks gather each other's outcomes. So a full disk, or a disk that another host
does not see, ends the save on all ranks at the same step and with the same error. No rank waits for
a failed one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from lightning_dist.engine.checkpoint.directory import (
    NotSavedError,
    describe_failure,
    resolve,
    storage_error,
)
from lightning_dist.engine.checkpoint.places import Draft, Place
from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import shorten

_SEEN_SECONDS = 5.0  # how long a network file system may take to show a new file elsewhere


@dataclass(frozen=True, slots=True)
class _Report:
    """The outcome of a step on a rank."""

    host: str
    result: Any = None
    failure: str = ""  # the step's error, in words
    failed_rank: int = 0  # where the error began; torch raises some errors on all ranks
    is_storage: bool = False  # whether the error was the file system's


class RanksFailedError(Exception):
    """An action failed on some ranks, and all ranks raise it, with the error of each of them."""

    def __init__(self, causes: Mapping[int, BaseException]) -> None:
        super().__init__(causes)
        self.causes = causes


class JointSave:
    """This rank's part in a save of all ranks of a group to one path; see :func:`.save_sharded`."""

    def __init__(self, path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> None:
        self._path = path
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)

    def step(self, action: Callable[[], Any]) -> list[Any]:
        """Runs an action on each rank, and returns the results of all. Collective.

        Raises:
            NotSavedError: A rank could not write.
            RuntimeError: An action failed otherwise.
        """
        reports, cause = self._reports(action)
        for report in reports:
            if report.failure:
                rank = report.failed_rank
                where = f"{report.failure} (Rank {rank}, host {reports[rank].host}.)"
                raise (NotSavedError if report.is_storage else RuntimeError)(where) from cause
        return [report.result for report in reports]

    def step_of_first(self, action: Callable[[], Any]) -> Any:
        """Runs an action on the first rank, and returns its result on all; see :meth:`step`."""
        return self.step(action if self._rank == 0 else lambda: None)[0]

    @contextmanager
    def draft(self, place: Place) -> Iterator[Draft]:
        """Creates an empty folder that each rank sees, and removes it if the save fails.

        Collective: every rank must enter it.

        Raises:
            ValueError: A rank has another disk and does not see the folder.
        """
        name = self.step_of_first(lambda: uuid4().hex)
        draft = place.draft(name)
        try:
            self._check_seen(draft, mark=f".seen.{name}")
            yield draft
        except BaseException:
            if self._rank == 0:
                draft.discard()
            raise

    def _check_seen(self, draft: Draft, mark: str) -> None:
        # The mark is in no folder of this path on another disk.
        self.step_of_first(lambda: draft.make_marked(mark))
        reports, _ = self._reports(lambda: _is_seen(draft, mark))
        if self._rank == 0:
            draft.unmark(mark)
        if blind := _blind(reports):
            raise ValueError(
                f"{os.fspath(self._path)} would be torn: {shorten(blind, 8)} cannot see the disk"
                f" that rank 0 (host {reports[0].host}) writes to, and each rank writes its part."
                " Save to a file system that all hosts share, or give the strategy"
                " `save_full=True`: then rank 0 writes one file."
            )

    def _reports(self, action: Callable[[], Any]) -> tuple[list[_Report], BaseException | None]:
        cause: BaseException | None = None
        host = socket.gethostname()
        try:
            own = _Report(host, action())
        except Exception as error:
            rank, cause = self._rank, error
            if isinstance(error, RanksFailedError) and error.causes:  # which all ranks raise
                rank = min(error.causes)
                cause = error.causes[rank]
            failure = describe_failure(self._path, cause)
            own = _Report(host, None, failure, rank, storage_error(cause) is not None)
        if self._group is None:
            return [own], cause
        return gather_objects(own, self._group), cause


def path_to_read(path: str, group: dist.ProcessGroup) -> str:
    """Returns the first rank's path, or this rank's own path if it does not see the first one.

    Collective: every rank of the group must call it.

    Raises:
        ValueError: Some ranks have a checkpoint to read, and others see none.
    """
    paths = gather_objects(path, group)
    seen = [candidate for candidate in (paths[0], path) if resolve(candidate).exists()]
    reports = gather_objects(_Report(socket.gethostname(), bool(seen)), group)
    blind = _blind(reports)
    if blind and len(blind) < len(paths):
        host = next(report.host for report in reports if report.result)
        raise ValueError(
            f"{paths[0]} is a checkpoint on host {host}, and"
            f" {shorten(blind, 8)} cannot see it. Load from a file system that all hosts share, or"
            " copy the checkpoint to the same path on each host."
        )
    return seen[0] if seen else str(paths[0])


def _is_seen(draft: Draft, mark: str) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while not draft.has(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _blind(reports: list[_Report]) -> list[str]:
    """Names the ranks that have not seen something."""
    return [f"rank {n} (host {r.host})" for n, r in enumerate(reports) if not r.result]

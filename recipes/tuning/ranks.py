"""The ranks of a study: the first one decides, all of them train.

Under torchrun each process is a rank. Each starts a process for each trial. If one of those fails
or is killed, all ranks end theirs, and the next trial begins.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from recipes.tuning.outcome import Order, Outcome, Report

T = TypeVar("T")
CONTEXT = multiprocessing.get_context("forkserver")
_POLL_SECONDS = 0.2
_FAILED = "failed"


class Ranks:
    """All ranks of this run.

    Attributes:
        is_first: Whether this is the rank that owns the study.
        size: Number of ranks.
    """

    def __init__(self) -> None:
        CONTEXT.set_forkserver_preload(["recipes.tuning.training"])
        self._is_launched = "RANK" in os.environ
        if self._is_launched:
            dist.init_process_group("gloo")
        self.size = dist.get_world_size() if self._is_launched else 1
        self.is_first = not self._is_launched or dist.get_rank() == 0

    def close(self) -> None:
        """Leaves the group of the ranks."""
        if self._is_launched:
            dist.destroy_process_group()

    def decide(self, make: Callable[[], T]) -> T:
        """Returns on all ranks what a function returns on the first one. Collective.

        Args:
            make: Called on the first rank only.

        Raises:
            ValueError: The function has raised one; it is raised on all ranks.
        """
        decided: list[Any] = [None, None]
        if self.is_first:
            try:
                decided[0] = make()
            except ValueError as error:
                decided[1] = error
        if self._is_launched:
            dist.broadcast_object_list(decided)
        if decided[1] is not None:
            raise decided[1]
        result: T = decided[0]
        return result

    def train(
        self,
        order: Order,
        objectives: tuple[str, ...],
        skipped_batches: int,
        report: Callable[[Report], bool],
    ) -> Outcome:
        """Trains a trial on all ranks. Collective.

        Args:
            order: The trial.
            objectives: Names of the objectives.
            skipped_batches: Batches whose time does not count.
            report: Called on the first rank at each validation; returns whether to prune.

        Returns:
            What became of it, the same on all ranks.
        """
        from recipes.tuning.training import train

        store = self._open_store() if self._is_launched else None
        environment = dict(os.environ)
        if store is not None:
            environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        near, far = CONTEXT.Pipe()
        arguments = (far, order, objectives, skipped_batches, environment)
        process = CONTEXT.Process(target=train, args=arguments)
        process.start()
        far.close()
        try:
            outcome = _watch(near, process, store, report)
            if outcome.state == "failed" and store is not None:
                store.set(_FAILED, "")
        finally:
            process.kill()
            process.join()
            near.close()
        return self._agree(outcome)

    def _open_store(self) -> TCPStore:
        """Opens the store where the processes of one trial meet."""
        host = os.environ["MASTER_ADDR"]
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.is_first else None
        port = self.decide(lambda: own.port if own is not None else 0)
        return own or TCPStore(host, port, is_master=False)

    def _agree(self, outcome: Outcome) -> Outcome:
        if not self._is_launched:
            return outcome
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        failed = [o for o in outcomes if o.state == "failed"]
        # A rank that has ended for another one's failure says less about the reason, or nothing.
        failed.sort(key=lambda o: (not o.error, o.error.startswith("RankFailedError")))
        return failed[0] if failed else outcomes[0]


def _watch(
    connection: Connection,
    process: Any,
    store: TCPStore | None,
    report: Callable[[Report], bool],
) -> Outcome:
    """Waits for the end of this rank's training, or for the failure of another's."""
    while True:
        if connection.poll(_POLL_SECONDS):
            try:
                message = connection.recv()
                if isinstance(message, Outcome):
                    return message
                connection.send(report(message))
            except (EOFError, ConnectionError):
                process.join()
                return Outcome("failed", error=_death(process.exitcode))
        elif store is not None and store.check([_FAILED]):
            return Outcome("failed")


def _death(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "The process was killed, as Linux does where memory is short."
    return f"The process ended with exit code {exit_code}."

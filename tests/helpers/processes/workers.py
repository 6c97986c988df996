"""A pool of processes that run many distributed cases, for starting one takes seconds.

A case is a module-level function. It runs on the first ``world_size`` workers at once, each in the
environment that a launcher would give it, and returns something picklable. A case that fails or
hangs costs the pool its processes; the next case gets new ones. A worker whose case has failed ends
at once, as a rank's process does: others may wait for its connections to close. The next case also
gets new ones after many runs that have failed on purpose: the threads of their process groups stay,
and hundreds of them slow a process.

Workers tidy up when they have answered, for what a case has returned is looked at meanwhile.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from torch.distributed import TCPStore

from tests.helpers.processes import stacks

# Forked from one server, all have one hash seed; spawned, in twice the time, each has its own, as a
# launcher's ranks do: what a rank takes from a set then has another order than on other ranks.
CONTEXT = multiprocessing.get_context(os.environ.get("WORKERS_START_BY", "forkserver"))
CONTEXT.set_forkserver_preload(["tests.helpers.processes.preload"])

MOST_THREADS = 100
PARTING_SECONDS = 0.5
TIDY_SECONDS = 60.0
STACK_SECONDS = 2.0  # before its time is over


class CaseFailedError(AssertionError):
    """A case raised on some rank."""


def free_port() -> int:
    """Asks the operating system for a port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Worker:
    """A process that runs cases.

    Attributes:
        process: It.
        connection: To it.
        tidies: Whether it will say how many threads a case has left it.
    """

    process: ForkServerProcess
    connection: Connection
    tidies: bool = False

    @classmethod
    def start(cls, work: Callable[..., None], *args: Any) -> Worker:
        """Starts one that serves its connection by a function, which is given further arguments."""
        near, far = CONTEXT.Pipe()
        process = CONTEXT.Process(target=work, args=(far, *args))
        process.start()
        far.close()
        return cls(process, near)

    def answer(self, deadline: float) -> tuple[bool, Any]:
        """Waits for what a case returns, or for what it raises."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                return False, f"timed out\n{stacks.read(self.process.pid or 0)}"
            self.tidies, result = self.connection.recv()
            return self.tidies, result
        except (EOFError, ConnectionResetError):
            return False, "the process died"

    def is_crowded(self) -> bool:
        """Waits until it has tidied up, and tells whether a case has left it many threads.

        Raises:
            CaseFailedError: It did not come through that.
        """
        if not self.tidies:
            return False
        self.tidies = False
        with suppress(EOFError, ConnectionResetError):
            if self.connection.poll(TIDY_SECONDS):
                return bool(self.connection.recv() > MOST_THREADS)
        raise CaseFailedError("a worker died or hung when it tidied up behind the case before")

    def kill(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Runs cases on processes that live longer than a case."""

    def __init__(self) -> None:
        self._workers: dict[Hashable, Worker] = {}
        atexit.register(self.close)  # daemons would need none, but may not have DataLoader workers

    def run(
        self, world_size: int, case: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Runs a case on each rank and gives what each returned."""
        # Here, so that no rank finds it missing and looks again a second later.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places = {
            rank: {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
            }
            for rank in range(world_size)
        }
        return self.run_at(places, case, *args, timeout=timeout)

    def run_at(
        self,
        places: Mapping[Any, Mapping[str, str]],
        case: Callable[..., Any],
        *args: Any,
        timeout: float,
    ) -> list[Any]:
        """Runs a case on workers that are named, each with what a launcher would tell it."""
        try:
            self._prepare(places)
        except CaseFailedError:
            self._kill()
            raise
        workers = [self._workers[place] for place in places]
        for worker, environment in zip(workers, places.values(), strict=True):
            worker.connection.send((case, args, dict(environment), timeout))
        deadline = time.monotonic() + timeout
        answers = []
        for worker in workers:
            answers.append(worker.answer(deadline))
            if not answers[-1][0]:  # the others may wait for this one
                deadline = min(deadline, time.monotonic() + 8.0)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self._kill()
            raise CaseFailedError("\n".join(failures))
        return [result for _, result in answers]

    def start_worker(self, place: Any) -> Worker:
        """Starts the worker of a place."""
        return Worker.start(serve)

    def close(self) -> None:
        """Ends all workers, which may give back what they have registered."""
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join(PARTING_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()  # all of them at once
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def _prepare(self, places: Iterable[Any]) -> None:
        for place in places:
            if place in self._workers and self._workers[place].is_crowded():
                self._workers.pop(place).kill()
            if place not in self._workers:
                self._workers[place] = self.start_worker(place)


def serve(connection: Connection) -> None:
    """Runs the cases that come over a connection."""
    import torch
    from tqdm import tqdm

    from tests.helpers.processes.chosen_transport import use_chosen_transport
    from tests.helpers.processes.remembered_shapes import remember_shapes

    use_chosen_transport()
    remember_shapes()
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    # Its own is a semaphore of processes, which one that is killed leaves behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for category, message in NAMED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    with suppress(EOFError, ConnectionError):  # when the tests are over
        while True:
            _run_next(connection)


def _run_next(connection: Connection) -> None:
    case, args, environment, timeout = connection.recv()
    groups: list[Any] = []
    try:
        with stacks.written_after(max(timeout - STACK_SECONDS, timeout / 2)):
            result = _run_case(groups, case, args, environment)
        connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        os._exit(1)
    gc.collect()  # trainers hold themselves, and so their groups with threads of their own
    gc.freeze()  # what is left was imported or is cached: none of it need be looked at again
    _release(groups)
    connection.send(len(os.listdir("/proc/self/task")))


def _end_with_the_tests() -> None:
    """Ends a worker that may be in the middle of a collective when the tests are killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_case(
    groups: list[Any],
    case: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> Any:
    """Runs a case, and adds to the groups those that it has left."""
    import torch.distributed as dist

    before = dict(os.environ)
    os.environ.update(environment)
    try:
        return case(*args)
    finally:
        if dist.is_initialized():
            groups += list(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            _forget_worlds()
        os.environ.clear()  # a seed that a case has set, for one, is not for the next
        os.environ.update(before)


def _release(groups: list[Any]) -> None:
    """Lets go of process groups at once: gloo's threads look every 10 ms whether they may end."""
    threads = [
        threading.Thread(target=list.pop, args=([groups.pop()],)) for _ in range(len(groups))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _forget_worlds() -> None:
    from lightning_dist.engine.comms.group_pool import forget_worlds

    forget_worlds()


# What Lightning and torch themselves warn about; anything else is an error in the workers too.
NAMED_WARNINGS: list[tuple[type[Warning], str]] = [
    (FutureWarning, r".*LeafSpec.*"),
    (UserWarning, r".*does not have many workers.*"),
    (UserWarning, r".*The number of training batches .* is smaller than the logging interval.*"),
    (UserWarning, r".*It is recommended to use `self.log.*sync_dist=True.*"),
    (UserWarning, r".*Checkpoint directory .* exists and is not empty.*"),
]

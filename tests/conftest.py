from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.helpers.long_tests import left_out
from tests.helpers.processes import chosen_transport
from tests.helpers.processes.entry_points import read_entry_points_once
from tests.helpers.processes.forked_runs import WarmPython
from tests.helpers.processes.workers import NAMED_WARNINGS, WorkerPool

# How long an example takes is the machine's business.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run the long tests too, and all cells of the matrices of which some run otherwise",
    )
    parser.addoption(
        "--transport",
        choices=("gloo", "p2p"),
        help="how tensors travel between the stages of all pipelines that leave it open",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    _let_processes_finish()
    _wait_briefly_for_names()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # else a launcher sets the threads anew, Lightning's too
    if chosen := config.getoption("transport"):
        os.environ[chosen_transport.VARIABLE] = chosen
        chosen_transport.use_chosen_transport()
    read_entry_points_once()
    for category, message in NAMED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{category.__name__}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any("::" in argument for argument in config.args)
    if config.getoption("all") or is_named:
        return
    left = set(left_out(items))
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imports without looking for garbage, of which they make none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """Processes for distributed cases, shared by the whole session."""
    pool = WorkerPool()
    yield pool
    pool.close()


WARM_PYTHON = pytest.StashKey[WarmPython]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    is_wanted = any("warm_python" in getattr(item, "fixturenames", ()) for item in session.items)
    if is_wanted and not session.config.option.collectonly:
        session.config.stash[WARM_PYTHON] = WarmPython()  # imports while other tests run


@pytest.fixture(scope="session")
def warm_python(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Forks processes for runs in which something goes wrong."""
    python = pytestconfig.stash[WARM_PYTHON]
    yield python
    python.close()


def _let_processes_finish() -> None:
    """Lets no process of the tests interrupt another one because something has come for it.

    A thread of gloo's spins while another one has the lock of a connection. Where ranks are more
    than cores, that one sends, the receiver takes its place, answers, and the spinning begins: a
    fifth of all time. Processes that are started from here inherit this.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux has it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _wait_briefly_for_names() -> None:
    """Lets no test wait for a name server that does not answer.

    torch looks up the name of whoever connects to a store. glibc asks again after 5 seconds.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

"""A process that does not answer in time tells where its threads are."""

from __future__ import annotations

import os
import time

from tests.helpers.processes import stacks


def test_a_process_tells_where_it_is() -> None:
    while "test_a_process_tells_where_it_is" not in _stacks_of_a_sleeper():
        pass  # on a loaded machine they may be written late, or not at all


def _stacks_of_a_sleeper() -> str:
    with stacks.written_after(0.01):
        time.sleep(0.2)  # frames of code that runs are not whole: a generator's has no caller
        return stacks.read(os.getpid())


def test_nothing_is_written_by_a_process_that_has_ended() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert stacks.read(child) == "(no stacks)"

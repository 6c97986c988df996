"""A process that does not answer in time tells where its threads are."""

from __future__ import annotations

import os
import time

from tests.helpers.processes import stacks


def test_a_process_tells_where_it_is() -> None:
    with stacks.written_after(0.01):
        while "test_a_process_tells_where_it_is" not in stacks.read(os.getpid()):
            time.sleep(0.01)


def test_nothing_is_written_by_a_process_that_has_ended() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert stacks.read(child) == "(no stacks)"

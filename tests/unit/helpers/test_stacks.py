"""A process that is asked tells where its threads are."""

from __future__ import annotations

import os

from tests.helpers.processes import stacks


def test_a_process_tells_where_it_is() -> None:
    stacks.write_when_asked()
    told = stacks.ask(os.getpid(), seconds=0.0)
    assert "test_a_process_tells_where_it_is" in told


def test_nothing_is_asked_of_a_process_that_has_ended() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert stacks.ask(child) == "(no stacks)"

"""A file in memory is opened by the process and the number that it has there, and by its name."""

from __future__ import annotations

import os

import pytest

from lightning_dist.engine.comms.batches.memory_file import open_file


def test_a_file_is_opened_for_reading_and_writing() -> None:
    made = os.memfd_create("some_name")
    found = open_file(os.getpid(), made, "some_name")
    os.pwrite(found, b"content", 0)
    assert os.pread(made, 7, 0) == b"content"
    os.close(made)
    os.close(found)


def test_a_file_of_another_name_or_none_is_refused() -> None:
    made = os.memfd_create("some_name_else")
    with pytest.raises(OSError, match="another file"):
        open_file(os.getpid(), made, "some_name")
    os.close(made)
    with pytest.raises(FileNotFoundError):
        open_file(os.getpid(), made, "some_name_else")

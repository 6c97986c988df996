"""One save at a time, with what has to wait for it behind it, on a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.checkpoint.background import BackgroundSaves


@pytest.fixture
def saves() -> Iterator[BackgroundSaves]:
    found = BackgroundSaves(cast(dist.ProcessGroup, None), torch.device("cpu"))
    yield found
    found.close()


def fail() -> None:
    raise OSError("no space is left")


def test_what_comes_behind_a_save_waits_for_it(saves: BackgroundSaves) -> None:
    did: list[Any] = []
    gate = threading.Event()
    saves.then(lambda: did.append(threading.current_thread()))
    assert did == [threading.main_thread()]
    saves.start(lambda: (gate.wait(), did.append("saved")))
    saves.then(lambda: did.append("removed"))
    assert did[1:] == []
    gate.set()
    saves.finish()
    assert did[1:] == ["saved", "removed"]
    saves.start(lambda: did.append("saved again"))
    saves.wait()
    assert did[-1] == "saved again"


def test_a_save_that_fails_keeps_what_was_to_be_removed(saves: BackgroundSaves) -> None:
    did: list[str] = []
    saves.start(fail)
    saves.then(lambda: did.append("removed"))
    saves.wait()
    saves.then(lambda: did.append("removed, too"))
    with pytest.raises(OSError, match="no space"):
        saves.finish()
    saves.finish()
    assert did == []


def test_an_error_behind_a_save_is_raised_too() -> None:
    saves = BackgroundSaves(cast(dist.ProcessGroup, None), torch.device("cpu"))
    saves.start(lambda: None)
    saves.then(fail)
    with pytest.raises(OSError, match="no space"):
        saves.close()


def test_a_copy_stays_as_it_was_and_its_memory_is_used_again(saves: BackgroundSaves) -> None:
    weights, losses = torch.ones(3, requires_grad=True), [1.0]
    copy = saves.copy({"weights": weights, "rest": {"losses": losses}})
    weights.data.zero_()
    losses.append(2.0)
    assert torch.equal(copy["weights"], torch.ones(3))
    assert copy["rest"] == {"losses": [1.0]}
    again = saves.copy({"weights": weights})
    assert torch.equal(again["weights"], torch.zeros(3))
    if torch.__version__ >= "2.13":  # before, a stager drops its memory
        assert again["weights"].data_ptr() == copy["weights"].data_ptr()
    saves.start(lambda: None)
    with pytest.raises(AssertionError, match="still be written"):
        saves.copy({"weights": weights})

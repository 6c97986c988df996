"""Sends that are on their way."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_dist.engine.comms.channel import PeerLostError
from lightning_dist.engine.comms.in_flight import HostOutbox


@pytest.mark.parametrize("profiled", [True, False])
def test_a_profiled_thread_waits_for_its_sends(profiled: bool) -> None:
    """Another thread may not end what the profiler has recorded."""
    waited: list[int] = []
    has_waited = threading.Event()

    def wait() -> None:
        waited.append(threading.get_ident())
        has_waited.set()

    work: Any = SimpleNamespace(wait=wait)
    outbox = HostOutbox(peer=1)
    with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext():
        outbox.keep([work], [torch.zeros(1)])
    assert has_waited.wait(10.0)
    outbox.close()
    assert (waited == [threading.get_ident()]) is profiled


def test_a_send_that_fails_under_a_profiler_is_a_lost_peer() -> None:
    work: Any = SimpleNamespace(wait=Mock(side_effect=RuntimeError("closed by peer")))
    outbox = HostOutbox(peer=1)
    with profile(activities=[ProfilerActivity.CPU]):
        outbox.keep([work], [torch.zeros(1)])
    with pytest.raises(PeerLostError, match="Rank 1 cannot be reached"):
        outbox.check()
    outbox.close()

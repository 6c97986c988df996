"""Sends that are on their way."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

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

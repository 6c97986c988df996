"""Marks become seconds, on a device whose events tell time in single precision too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dist.engine.profiling.meters import recorder
from lightning_dist.engine.profiling.meters.recorder import CudaClock


class Device:
    """A device that passes its events at once, and the clocks of its host."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


class Event:
    """As CUDA's."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self, _: object) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None
        assert other.at is not None
        return float(np.float32((other.at - self.at) * 1e3))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    clock: Any = SimpleNamespace(time=device.time, monotonic=device.monotonic)
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return device


@pytest.mark.parametrize("asks", [False, True])
def test_a_mark_after_hours_is_as_exact_as_the_first(device: Device, asks: bool) -> None:
    clock, begin = CudaClock(torch.device("cuda")), device.now
    first = clock.mark()
    for _ in range(20_000):
        device.now += 2.0
        mark = clock.mark()
        if asks:
            clock.seconds(mark)
    device.now += 1 / 1024
    last = clock.mark()
    assert clock.seconds(first) == begin
    assert clock.seconds(last) - clock.seconds(mark) == pytest.approx(1 / 1024, abs=2e-6)
    assert clock.seconds(last) - begin == pytest.approx(40_000 + 1 / 1024, abs=1e-3)

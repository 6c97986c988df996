"""Looking where a thread is collects no garbage, which could wait forever."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

import pytest

from lightning_dist.engine.comms.failures.heartbeat import frame_of


def test_gives_the_frame_of_a_thread() -> None:
    frame = frame_of(threading.get_ident())
    assert frame is not None
    while frame.f_code.co_name != "test_gives_the_frame_of_a_thread":
        assert frame.f_back is not None
        frame = frame.f_back
    assert frame_of(-1) is None


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    seen: list[bool] = []

    def current_frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert frame_of(0) is None
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]

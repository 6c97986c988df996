"""When the clock of a measurement starts."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.strategies.mesh_runtime.measuring import updates


def test_what_is_under_way_on_the_device_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(updates, "finish", lambda device: notes.append("finish"))
    monkeypatch.setattr(updates.time, "perf_counter", lambda: notes.append("clock") or 0.0)
    updates.time_call(lambda: notes.append("run"), torch.device("cpu"))
    assert notes == ["finish", "clock", "run", "finish", "clock"]

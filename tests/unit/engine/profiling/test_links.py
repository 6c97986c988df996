"""What a measurement of a link counts."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.engine.profiling import links


def test_forming_a_connection_does_not_lower_the_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = 0.0, 0

    def send() -> None:
        nonlocal now, calls
        calls += 1
        now += 1.0 if calls == 1 else 1e-3  # the first one forms the connection

    monkeypatch.setattr(links, "_longest", lambda seconds, device: seconds)
    monkeypatch.setattr(links.time, "perf_counter", lambda: now)
    taken = links.time_on_slowest_rank(send, torch.device("cpu"), per_round=0.0105)
    assert taken == pytest.approx(1e-3)
    assert calls == 2 + 3 * 10  # messages of three rounds

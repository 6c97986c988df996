"""Ranks in threads that wait for a message that never comes end, and tell where they wait."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.pipeline.pipeline import Pipeline
from tests.helpers.processes.threads import Yielding, run_ranks, shapes_of


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def train(model: nn.Sequential, pipeline: Pipeline) -> None:
    pipeline.train_batch(torch.ones(4, 2), lambda m: model(m.content).square().mean())


def test_a_wrong_tag_is_found_by_the_action_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Yielding, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        MemoryChannel.send(self, tree, tag=tag + 1, key=key)

    monkeypatch.setattr(Yielding, "send", send)
    with pytest.raises(TimeoutError, match=r"Ranks \[0, 1\] have not ended") as caught:
        run_ranks(make, shapes_of("1f1b", 2, (1, 1)), train, seconds=2)
    notes = "\n".join(caught.value.__notes__)
    assert "While rank 1 ran action 1RECV_F0" in notes
    assert "While rank 0 ran action 0RECV_B0" in notes

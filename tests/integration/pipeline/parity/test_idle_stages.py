"""Stages that train nothing: of frozen layers, or of layers without parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Upper(Classifier):
    """Trains its second half only."""

    def __init__(self, first: str) -> None:
        super().__init__()
        lower = [nn.Linear(12, 12), nn.Linear(12, 12)] if first == "frozen" else [nn.Tanh()] * 2
        layers = [nn.Sequential(nn.Flatten(), lower[0]), lower[1], nn.Linear(12, 8)]
        self.model = nn.Sequential(*layers, nn.Sequential(nn.Tanh(), nn.Linear(8, 3)))
        self.model[:2].requires_grad_(False)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"gradient_clip_val": 0.02}),
    ("zbv", {"accumulate_grad_batches": 2}),
    ("pipedream", {}),  # what is trained is on the last stage, where nothing is stale
]


def fit(devices: int, first: str, schedule: str, trainer: dict[str, Any]) -> dict[str, Tensor]:
    module = make_module(Upper, first=first)
    partition = [1, 1, 1, 1] if schedule == "zbv" else [2, 2]
    strategy: Any = "auto"
    if devices > 1:
        strategy = PipelineStrategy(schedule=schedule, partition=partition)
    fitting = make_trainer(devices=devices, strategy=strategy, **trainer)
    fitting.fit(module, make_loader(), make_loader(8))
    return state_of(module)


def fit_all(devices: int) -> list[dict[str, Tensor]]:
    return [fit(devices, first, *case) for case in CASES for first in ("frozen", "empty")]


def test_equal_a_single_device(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = workers.run(2, fit_all, 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for *parts, expected in zip(*ranks, fit_all(1), strict=True):
        found = {name: value for part in parts for name, value in part.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)

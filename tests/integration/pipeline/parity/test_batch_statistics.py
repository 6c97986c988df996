"""BatchNorm under strategies that are left to choose the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.strategies.pipelining import start_line
from tests.helpers.networks.models import Classifier, make_data, make_trainer
from tests.helpers.processes.workers import WorkerPool


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.model = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(24, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3),
        )


def fit(devices: int, strategy: Any) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(5)
    module = WithBatchNorm().double()
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_line, "rank_zero_info", told.append)
        trainer = make_trainer(devices=devices, strategy=strategy)
        loader = DataLoader(make_data(20), batch_size=8)
        trainer.fit(module, loader, DataLoader(make_data(8), batch_size=8))
    return trainer.strategy.lightning_module_state_dict(), told


def fit_all() -> list[tuple[dict[str, Tensor], list[str]]]:
    strategies: list[Strategy] = [
        PipelineStrategy(),
        PipelineStrategy(schedule="zb_h1"),
        MeshStrategy(pp=2),
        PipelineStrategy(num_microbatches=2),
    ]
    return [fit(2, strategy) for strategy in strategies]


def test_statistics_are_those_of_one_device(workers: WorkerPool) -> None:
    expected, _ = fit(1, "auto")
    ranks = workers.run(2, fit_all)
    for index in range(3):
        state = {name: value for rank in ranks for name, value in rank[index][0].items()}
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert (state[name] - value).abs().max() < 1e-12, (index, name)
        line, reason = ranks[0][index][1]
        assert "1 micro-batch of 8 samples" in line
        assert "model.1 (BatchNorm1d), model.5 (BatchNorm1d): statistics of the batch are" in reason
    _, reason = ranks[0][3][1]
    assert "micro-batches of 4 samples, where one device has 8" in reason

"""BatchNorm under strategies that are left to choose the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.strategies.pipelining import start_line
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import Classifier, make_data, make_trainer, share_of, state_of
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


class NormedHead(WithBatchNorm):
    """Normalises behind its layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.norm(self.model(batch[0])), batch[1])
        self.log("train_loss", loss)
        return loss


SYNCED: dict[str, Any] = {
    "1f1b": lambda: PipelineStrategy(num_stages=2),
    "pipedream": lambda: PipelineStrategy(num_stages=2, schedule="pipedream"),
    "pipedream_2bw": lambda: PipelineStrategy(num_stages=2, schedule="pipedream_2bw"),
    "a mesh": lambda: MeshStrategy(pp=2, dp_replicate=2),
    "shards": lambda: MeshStrategy(pp=2, dp_shard=2),
    "shards, recomputed": lambda: MeshStrategy(
        pp=2,
        dp_shard=2,
        shard=ShardConfig(wrap=ByClass(["BatchNorm1d"]), activation_checkpointing="full"),
    ),
}


def fit_synced(name: str, devices: int) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(5)
    module, told = NormedHead().double(), list[str]()
    strategy = SYNCED[name]() if devices > 1 else "auto"
    if devices == 2 and name in ("a mesh", "shards", "shards, recomputed"):
        strategy = MeshStrategy(pp=2)
    trainer = make_trainer(devices=devices, strategy=strategy, sync_batchnorm=devices == 4)
    loader = DataLoader(make_data(48), batch_size=8)
    if devices == 4:
        loader = share_of(trainer.strategy.distributed_sampler_kwargs["rank"], 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_line, "rank_zero_info", told.append)
        trainer.fit(module, loader, DataLoader(make_data(8), batch_size=8))
    if isinstance(strategy, PipelineStrategy):
        assert not any("forward" in vars(part) for part in module.modules())
    running = {name: value.clone() for name, value in module.named_buffers()}
    return {**state_of(module), **running}, told


@pytest.mark.some("1f1b", "shards, recomputed")
@pytest.mark.parametrize("name", SYNCED)
def test_replicas_of_stages_normalise_by_all_samples(workers: WorkerPool, name: str) -> None:
    """As one replica does, under asynchronous schedules too."""
    alone, together = workers.run(2, fit_synced, name, 2), workers.run(4, fit_synced, name, 4)
    expected, found = (
        {n: v for state, _ in ranks for n, v in state.items()} for ranks in (alone, together)
    )
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        assert (found[each].double() - value.double()).abs().max() < 1e-12, each
    assert not any("a rank's own batch" in line for line in together[0][1])


def fit_apart() -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_line, "rank_zero_info", told.append)
        trainer = make_trainer(devices=4, strategy=PipelineStrategy(num_stages=2))
        own = share_of(trainer.strategy.distributed_sampler_kwargs["rank"], 16)
        trainer.fit(WithBatchNorm().double(), own, own)
    return told


def test_replicas_that_normalise_apart_say_so(workers: WorkerPool) -> None:
    assert "Trainer(sync_batchnorm=True)" in workers.run(4, fit_apart)[0][-1]


def fit_traced() -> str:
    strategy = PipelineStrategy(num_stages=2, layers="trace")
    trainer = make_trainer(devices=4, strategy=strategy, sync_batchnorm=True)
    loader = DataLoader(make_data(8), batch_size=4)
    with pytest.raises(ValueError, match="^sync_batchnorm: this model has to be traced"):
        trainer.fit(WithBatchNorm().double(), loader, loader)
    return "refused"


def test_a_trace_cannot_normalise_by_all_samples(workers: WorkerPool) -> None:
    assert workers.run(4, fit_traced) == ["refused"] * 4

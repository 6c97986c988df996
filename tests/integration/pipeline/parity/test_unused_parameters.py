"""Replicas of a pipeline whose shares of a batch use other parameters than each other."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Subset, TensorDataset
from typing_extensions import override

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13
MESHES = ("dp_replicate", "dp_shard") if SENDS_ZEROS else ("dp_replicate",)


class Experts(nn.Module):
    """Sends a sample to the expert that its first number chooses; an expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 4), nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        chosen, out = x[:, 0] > 0, torch.zeros_like(x)
        for expert, samples in ((self.positive, chosen), (self.negative, ~chosen)):
            if samples.any():
                out = out.index_put((samples,), expert(x[samples]))
        return torch.cat([x[:, :1], out[:, 1:]], dim=1)


class Mixture(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(Experts(), Experts(), Experts(), nn.Linear(4, 1)).double()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Decays weights with a gradient of zero, and leaves those without one as they are.
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def make_batches() -> TensorDataset:
    """Of eight samples, every other one is the second replica's."""
    x = torch.randn(6 * 8, 4, generator=torch.Generator().manual_seed(1)).double()
    signs = torch.ones(6, 4, 2)
    signs[0, :, 1] = -1  # each replica uses an expert of its own
    signs[2, :, 0] = -1
    signs[3, :2, 1] = -1  # the first replica does not use an expert that the second one does
    x[:, 0] = x[:, 0].abs() * signs.flatten()  # batches 1, 4 and 5: an expert that none uses
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


class Zeroing(Mixture):
    """Keeps gradients of zero, so that weights decay in a step that does not use them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def fit(
    schedule: str | None, num_replicas: int, module_class: type[Mixture] = Mixture
) -> dict[str, Tensor]:
    module, strategy = module_class(), "auto"
    if schedule in MESHES:
        pipeline = PipelineConfig(num_microbatches=2, partition=[2, 2])
        shard = ShardConfig(find_unused_parameters=True)
        strategy = MeshStrategy(pp=2, **{schedule: num_replicas}, pipeline=pipeline, shard=shard)
    elif schedule is not None:
        num_microbatches = 1 if schedule == "pipedream" else 2
        strategy = PipelineStrategy(2, schedule, num_microbatches, partition=[2, 2])
    trainer = make_trainer(
        devices=1 if schedule is None else 2 * num_replicas,
        strategy=strategy,
    )
    replica = int(os.environ["RANK"]) % num_replicas if num_replicas > 1 else 0
    share = Subset(make_batches(), range(replica, 6 * 8, num_replicas))
    trainer.fit(module, DataLoader(share, batch_size=8 // num_replicas))
    assert trainer.global_step == 6
    return state_of(module)


SCHEDULES = (*MESHES, "1f1b", "zb_h1", "pipedream", "pipedream_2bw")


def fit_all(num_replicas: int) -> list[dict[str, Tensor]]:
    return [fit(schedule, num_replicas) for schedule in SCHEDULES]


def test_what_a_replica_does_not_use_counts_as_zero(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = workers.run(4, fit_all, 2), workers.run(2, fit_all, 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    single = fit(None, 1)
    for index, schedule in enumerate(SCHEDULES):
        expected = {name: value for part in alone for name, value in part[index].items()}
        if not schedule.startswith("pipedream"):  # whose oracles have tests of their own
            torch.testing.assert_close(expected, single, rtol=0, atol=1e-12)
        for part in together:
            for name, value in part[index].items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def fit_zeroing() -> list[dict[str, Tensor]]:
    return [fit(axis, 2, Zeroing) for axis in MESHES]


def test_gradients_of_zero_stay_what_they_are(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(4, fit_zeroing)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    single = fit(None, 1, Zeroing)
    for states in ranks:
        for state in states:
            for name, value in state.items():
                torch.testing.assert_close(value, single[name], rtol=0, atol=1e-12)

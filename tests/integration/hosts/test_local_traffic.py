"""Replicas that step by themselves send less, by what the network's interface has counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, MeshStrategy, OuterOptimizer
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from tests.helpers.hosts.cluster import Cluster, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_trainer

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,
]

WIDTH = 1024
WEIGHT_BYTES = 4 * WIDTH * WIDTH
NUM_STEPS, EVERY = 16, 8
CONTROL_BYTES_PER_STEP = 16 * 2**10
"""Votes on stopping and the like, in each step."""
FRAMING = 1.1
"""Headers and acknowledgements."""


class Wide(LightningModule):
    """A layer of which a rank sends 4 MiB at a time. Counts what its host sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.marks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.marks.append(_sent_bytes())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == NUM_STEPS - 1:
            self.marks.append(_sent_bytes())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _sent_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (own,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(own.partition(":")[2].split()[8])


def train(on_mesh: bool, options: dict[str, Any]) -> int:
    """Returns the bytes that this rank's host has sent in an epoch."""
    strategy: Any = DDPStrategy(**options)
    if on_mesh:
        strategy = MeshStrategy(dp_replicate=2, dp_shard=1, local=LocalConfig(**options))
    trainer = make_trainer(num_nodes=2, devices=1, strategy=strategy)
    module = Wide()
    trainer.fit(module, DataLoader(torch.randn(NUM_STEPS, WIDTH)))
    before, behind = module.marks
    return behind - before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hosts(2) as cluster:
        yield cluster


DILOCO: dict[str, Any] = {"sync_every": EVERY, "outer": OuterOptimizer()}


@pytest.mark.parametrize(
    ("options", "sent_bytes"),
    [
        ({}, NUM_STEPS * WEIGHT_BYTES),
        ({"sync_every": EVERY}, NUM_STEPS // EVERY * WEIGHT_BYTES),
        (DILOCO, NUM_STEPS // EVERY * WEIGHT_BYTES),
        ({**DILOCO, "wire": "bf16"}, NUM_STEPS // EVERY * WEIGHT_BYTES // 2),
    ],
)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_bytes_on_the_wire(
    host_workers: HostWorkers, on_mesh: bool, options: dict[str, Any], sent_bytes: int
) -> None:
    # Of two ranks each sends as much as it has to average, in an all-reduce.
    for found in host_workers.run_on([0, 1], train, on_mesh, options):
        print(f"mesh={on_mesh} {options}: {found / 2**20:.2f} MiB for {sent_bytes / 2**20:.2f}")
        assert sent_bytes < found < FRAMING * sent_bytes + NUM_STEPS * CONTROL_BYTES_PER_STEP

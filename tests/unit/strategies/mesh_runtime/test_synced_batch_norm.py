from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lightning_dist.strategies.mesh_runtime.synced_batch_norm import ReplicaSyncBatchNorm


def test_torchs_layers_synchronise_over_the_replicas_and_not_over_all_ranks() -> None:
    replicas = dist.ProcessGroup(0, 2)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ReplicaSyncBatchNorm(replicas).apply(model)
    layer = model[1]
    assert isinstance(layer, nn.SyncBatchNorm)
    assert layer.process_group is replicas

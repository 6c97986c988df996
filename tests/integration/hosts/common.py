"""What the tests on hosts share: strategies by number of ranks, and a training in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_module,
    make_trainer,
    state_of,
)

DEPTH = 7  # nine layers, so that four ranks can have two stages each
NUM_SAMPLES = 40
GLOBAL_BATCH = 8
PLAN = {"model.*.linear": "colwise_gather"}


class Unlogged(Classifier):
    """Trains only; what is logged on replicas is a matter of other tests."""

    validation_step = L.LightningModule.validation_step

    def log(self, *args: Any, **kwargs: Any) -> None:
        return


_stages = partial(PipelineStrategy, partition="uniform")
_tensor = partial(TensorParallelStrategy, tp_size=2, plan=PLAN)
_mesh = partial(MeshStrategy, pp=2, pipeline=PipelineConfig(partition="uniform"))

STRATEGIES: dict[str, dict[int, Callable[[], Strategy]]] = {
    "ddp": {2: DDPStrategy, 4: DDPStrategy},
    "fsdp": {2: FSDPStrategy, 4: FSDPStrategy},
    "hsdp": {2: FSDPStrategy, 4: partial(FSDPStrategy, shard_size=2)},
    "tensor": {2: _tensor, 4: _tensor},
    "1f1b": dict.fromkeys((2, 4), partial(_stages, schedule="1f1b")),
    "interleaved_1f1b": dict.fromkeys((2, 4), partial(_stages, schedule="interleaved_1f1b")),
    "pipedream": dict.fromkeys((2, 4), partial(_stages, schedule="pipedream")),
    "pipedream_2bw": dict.fromkeys((2, 4), partial(_stages, schedule="pipedream_2bw")),
    "stages of shards": {2: partial(_mesh, dp_shard=1), 4: partial(_mesh, dp_shard=2)},
    "stages of tensors": {
        2: partial(_mesh, dp_shard=1),
        4: partial(_mesh, tp=2, tensor=TensorConfig(plan=PLAN)),
    },
}
"""Strategies by the number of ranks. On two ranks, a mesh has but one axis."""


def train(
    strategy: str | None, nodes: int, devices: int, epochs: int, resume: str | None, save: str
) -> dict[str, Tensor]:
    """Trains up to an epoch, saves, and returns the parameters that this rank holds.

    Args:
        strategy: A key of ``STRATEGIES``, or None for one device.
        nodes: Number of hosts.
        devices: Ranks on each.
        epochs: After how many epochs to end, those before the checkpoint included.
        resume: The checkpoint to go on from.
        save: The checkpoint to write.
    """
    module = make_module(Unlogged, depth=DEPTH)
    made = "auto" if strategy is None else STRATEGIES[strategy][nodes * devices]()
    trainer = make_trainer(num_nodes=nodes, devices=devices, strategy=made, max_epochs=epochs)
    share: dict[str, Any] = {"num_replicas": 1, "rank": 0}
    if nodes * devices > 1:
        share = trainer.strategy.distributed_sampler_kwargs
    data = make_data(NUM_SAMPLES)
    sampler: Any = DistributedSampler(data, shuffle=False, **share)
    batches = DataLoader(data, GLOBAL_BATCH // share["num_replicas"], sampler=sampler)
    trainer.fit(module, batches, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(save)
    return state_of(module)

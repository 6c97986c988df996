"""What tests of parameters beside layers share: layouts, a comparison, runs in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of

State = dict[str, Tensor]

CUT = PipelineConfig("zb_h1", 2)
LAYOUTS: dict[str, Callable[[], Any]] = {
    "stages": lambda: PipelineStrategy(num_microbatches=2),
    "replicas": lambda: PipelineStrategy(num_stages=2, num_microbatches=2),
    "shards": lambda: MeshStrategy(pp=2, dp_shard=2, pipeline=CUT),
}
UPDATES: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


def fit_half(class_: type[L.LightningModule], devices: int) -> State:
    """Trains in bf16 with masters, on stages or on a single device."""
    batches: Any = [(x.float(), y) for x, y in make_loader()]
    module = make_module(class_).float()
    strategy: Any = PipelineStrategy(num_microbatches=1) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=[MixedPrecision("bf16")])
    loader = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, loader)
    return state_of(module)

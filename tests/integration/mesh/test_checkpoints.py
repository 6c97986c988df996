"""What each stage has a copy of is saved as the last one has it, which runs whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dist import MeshStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class Counting(Classifier):
    """Counts the steps that came to their end, in a buffer that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.num_steps += 1
        return loss


def train_and_save(path: str) -> None:
    strategy = MeshStrategy(pp=2, pipeline=PipelineConfig(num_microbatches=2))
    trainer = make_trainer(devices=2, strategy=strategy)
    trainer.fit(make_module(Counting), make_loader(16), make_loader(16))
    trainer.save_checkpoint(path)


def test_a_buffer_outside_of_the_layers_is_the_last_stages(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "counted.ckpt"
    workers.run(2, train_and_save, str(path))
    num_batches, num_microbatches = 2, 2
    assert load_full(path)["state_dict"]["num_steps"] == num_batches * num_microbatches

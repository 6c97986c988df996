"""A replica's checkpoint is the file that a single device writes, and is read as that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_dist import DDPStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Finetuned(Classifier):
    """Trains its head first."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.backbone = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((self.backbone(x), y), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def train(devices: int, epochs: int, resume: str | None, save: str | None) -> dict[str, Tensor]:
    module = make_module(Finetuned)
    trainer = make_trainer(
        strategy=DDPStrategy() if devices > 1 else "auto",
        devices=devices,
        max_epochs=epochs,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)],
    )
    loaders = make_loader(24), make_loader(8)
    if devices > 1:
        place = trainer.strategy.distributed_sampler_kwargs["rank"]
        loaders = share_of(place, 24), share_of(place, 8)
    trainer.fit(module, *loaders, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


def test_groups_that_were_added_later_are_saved_and_resumed(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = str(tmp_path / "some.ckpt")
    workers.run(2, train, 2, 2, None, path)
    saved = torch.load(path, weights_only=True)
    assert len(saved["optimizer_states"][0]["param_groups"]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["some.ckpt"]
    expected = train(1, 3, path, None)
    for state in workers.run(2, train, 2, 3, path, None):
        for name, value in state.items():
            assert float((value - expected[name]).abs().max()) < 1e-12, name

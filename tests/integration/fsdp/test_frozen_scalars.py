"""A frozen parameter without a dimension is left whole on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import FSDPStrategy, MeshStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Scaled(ConvLayer):
    """Has a number that checkpoints shall have, and that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class WithScalars(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Scaled(), Scaled(), nn.Flatten(), nn.Linear(12, 3))
        self.temperature = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) / self.temperature, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "shards": FSDPStrategy,
    "hybrid": lambda: MeshStrategy(dp_replicate=2, dp_shard=2),
    "stages": lambda: MeshStrategy(pp=2, dp_shard=2),
}


def fit(name: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    devices = {"one": 1, "shards": 2}.get(name, 4)
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[name](), gradient_clip_val=0.5)
    module = make_module(WithScalars)
    trainer.fit(module, make_loader(24), make_loader(8))
    path = f"{folder}/{name}.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    saved = torch.load(path) if name == "one" else load_full(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(make_module(WithScalars), make_loader(24), make_loader(8), ckpt_path=path)
    return saved["state_dict"], state_of(trainer.lightning_module)


@pytest.mark.some("shards")
@pytest.mark.parametrize("name", ["shards", "hybrid", "stages"])
def test_frozen_scalars_stay_whole(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    ((saved, resumed),) = workers.run(1, fit, "one", str(tmp_path))
    devices = 2 if name == "shards" else 4
    for found, again in workers.run(devices, fit, name, str(tmp_path)):
        assert found.keys() == saved.keys()
        for key, value in saved.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10, msg=key)
        for key, value in again.items():
            torch.testing.assert_close(value, resumed[key], rtol=1e-8, atol=1e-10, msg=key)


class Thaws(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.temperature.requires_grad_()


def thaw() -> str:
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(), callbacks=[Thaws()])
    with pytest.raises(ValueError, match="no dimension") as caught:
        trainer.fit(make_module(WithScalars), make_loader(24), make_loader(8))
    return str(caught.value)


def test_a_thawed_scalar_is_refused(workers: WorkerPool) -> None:
    for message in workers.run(2, thaw):
        assert "'temperature'" in message

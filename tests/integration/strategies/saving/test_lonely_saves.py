"""A save on one rank alone ends with an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import Strategy

from lightning_dist import DDPStrategy, FSDPStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class SavesAlone(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)


def attempt(strategy: Strategy, path: str) -> list[str]:
    trainer = make_trainer(
        devices=2, strategy=strategy, callbacks=[SavesAlone(path)], limit_val_batches=0
    )
    try:
        trainer.fit(make_module(), make_loader(32), make_loader(8))
    except RuntimeError as error:
        return getattr(error, "__notes__", [])
    raise AssertionError("no error")


@pytest.mark.some("ddp")
@pytest.mark.parametrize(
    "strategy", [DDPStrategy(timeout_s=4.0), FSDPStrategy(timeout_s=4.0)], ids=["ddp", "fsdp"]
)
def test_a_save_on_one_rank_names_itself(
    workers: WorkerPool, strategy: Strategy, tmp_path: Path
) -> None:
    saving, training = workers.run(2, attempt, strategy, str(tmp_path / "some.ckpt"))
    assert any("`trainer.save_checkpoint`, which all ranks must call:" in note for note in saving)
    assert not any("save_checkpoint" in note for note in training)

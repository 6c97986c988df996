from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import torch

from recipes.tuning.outcome import Report
from recipes.tuning.training import Progress


def test_the_validations_of_an_epoch_are_counted() -> None:
    sent: list[Report] = []
    connection: Any = SimpleNamespace(send=sent.append, recv=lambda: False)
    trainer: Any = SimpleNamespace(
        sanity_checking=True,
        is_global_zero=True,
        current_epoch=0,
        callback_metrics={"val_loss": torch.tensor(2.0)},
        strategy=SimpleNamespace(broadcast=lambda found: found),
    )
    progress, module = Progress(connection, ("val_loss",), 0), L.LightningModule()
    progress.on_validation_end(trainer, module)
    trainer.sanity_checking = False
    for trainer.current_epoch in (0, 0, 1):
        progress.on_validation_end(trainer, module)
    assert sent == [Report(2.0, 0), Report(2.0, 1), Report(2.0, 2)]

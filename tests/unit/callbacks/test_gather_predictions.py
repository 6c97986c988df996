"""Predictions on one device, joined; what cannot be joined."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dist.callbacks import GatherPredictions
from tests.helpers.networks.models import make_trainer

ROWS: Any = torch.arange(7.0)[:, None]


class Returns(L.LightningModule):
    """Returns what a function makes of a batch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(batch)


def predict(change: Any, **options: Any) -> Any:
    trainer = make_trainer(devices=1, callbacks=[GatherPredictions()])
    order = [6, 5, 4, 3, 2, 1, 0, 6]  # the last sample twice
    return trainer.predict(
        Returns(change), DataLoader(ROWS, sampler=order, batch_size=3), **options
    )


def test_samples_are_in_order_and_once() -> None:
    (found,) = predict(lambda batch: batch)
    assert torch.equal(found, ROWS)
    assert predict(lambda batch: batch, return_predictions=False) is None


def test_what_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match=r"cannot join \(\)"):
        predict(lambda batch: batch.sum())
    with pytest.raises(ValueError, match=r"cannot join \(2, 2\), \(3, 3\)"):
        predict(lambda batch: batch.expand(-1, len(batch)))
    with pytest.raises(ValueError, match=r"cannot join \(3, 1\), str"):
        predict(lambda batch: batch if len(batch) == 3 else "none")
    with pytest.raises(ValueError, match=r"cannot join \(2, 1\), list"):
        predict(lambda batch: [1.0, 2.0, 3.0] if len(batch) == 3 else batch)
    with pytest.raises(ValueError, match="3 rows or entries"):
        predict(lambda batch: batch[:1])

"""Errors of hooks that pair a stage's parameters with another network's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dist.strategies.pipelining.results.outside_tensors import note_pairing


class Paired(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.teacher = nn.Linear(3, 2), nn.Linear(4, 5)

    def on_train_batch_end(self, *_: object) -> None:
        self.training_step()

    def training_step(self) -> None:
        self.teacher.weight.data.lerp_(self.own.weight.data, 0.1)

    def on_fit_end(self) -> None:
        torch.ones(2).view(3)


def notes_of(call: Callable[[], None]) -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        call()
    note_pairing(caught.value)
    return getattr(caught.value, "__notes__", [])


def test_a_pair_of_other_shapes_is_explained_in_hooks_only() -> None:
    module = Paired()
    (note,) = notes_of(module.on_train_batch_end)
    assert "in `on_train_batch_end`" in note
    assert "but by name: `followers = dict(teacher.named_parameters(" in note
    assert notes_of(module.training_step) == []
    assert notes_of(module.on_fit_end) == []

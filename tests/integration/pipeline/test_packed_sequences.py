"""Packed sequences travel between stages, as other named tuples do; over gloo of any lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Pack(nn.Module):
    """Takes sequences of some lengths, unsorted, and computes with their values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> PackedSequence:
        lengths = 1 + (x[:, 0].abs().sum(-1) * 100).long() % 6
        sequences = self.embed(x.transpose(1, 2))
        return pack_padded_sequence(sequences, lengths, True, enforce_sorted=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        out: PackedSequence = self.cell(packed)[0]
        return out


class Last(nn.Module):
    def forward(self, packed: PackedSequence) -> Tensor:
        return pad_packed_sequence(packed, batch_first=True, total_length=6)[0].sum(1)


class OfSequences(Classifier):
    def __init__(self) -> None:
        super().__init__()
        recurrent = (Recurrent(), Recurrent(), Recurrent())
        self.model = nn.Sequential(Pack(), *recurrent, Last(), nn.Linear(4, 3))


def fit(strategy: Any) -> tuple[dict[str, Tensor], float]:
    module = make_module(OfSequences)
    devices = 1 if strategy == "auto" else 2
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(), make_loader(16))
    return state_of(module), float(trainer.callback_metrics["val_loss"])


def test_recurrent_layers_on_stages_equal_one_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = PipelineStrategy(partition=[3, 3], num_microbatches=2, transport="gloo")
    ranks = workers.run(2, fit, strategy)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, loss = fit("auto")
    actual = {name: value for state, _ in ranks for name, value in state.items()}
    assert actual.keys() == expected.keys()
    assert all(torch.allclose(actual[n], value, 0, 1e-12) for n, value in expected.items())
    assert all(abs(found - loss) < 1e-12 for _, found in ranks)

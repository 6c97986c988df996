"""Layers that take dim 0 for time, beside batches that are cut along it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensors.samples import warn_of_time_first
from tests.helpers.block_parity import largest_difference

TIME, SAMPLES, SIZE = 5, 4, 6


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.transpose(0, 1))[0]
        return out.transpose(0, 1)


LAYERS = {
    "transformer": lambda first: nn.TransformerEncoderLayer(SIZE, 2, 8, batch_first=first),
    "lstm": lambda first: nn.LSTM(SIZE, SIZE, batch_first=first),
}


@pytest.mark.parametrize("name", LAYERS)
def test_batches_that_are_cut_in_time_are_warned_of(name: str) -> None:
    layer = nn.Sequential(LAYERS[name](False))
    batch = torch.randn(TIME, SAMPLES, SIZE)
    with pytest.warns(UserWarning, match=r"takes dim 0 .* got \(2, 4, 6\)") as caught:  # noqa: SIM117
        with warn_of_time_first(layer, 2):
            layer(batch[:2])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(batch[:2])  # the look is over


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_samples_are_not(name: str) -> None:
    batch = torch.randn(SAMPLES, TIME, SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in (LAYERS[name](True), Transposed()):
            with warn_of_time_first(layer, 2):
                layer(batch[:2])
        layer = LAYERS[name](False)
        with warn_of_time_first(layer, 2):
            layer(batch[:2].transpose(0, 1))
            layer(batch[0])  # one sequence


def test_a_pipeline_looks_at_its_first_micro_batch() -> None:
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(SIZE, 2, 8, dropout=0.0) for _ in range(4))
    model = nn.Sequential(*blocks).double()
    batches = list(torch.randn(2, TIME + 1, SAMPLES, SIZE, dtype=torch.float64))
    with pytest.warns(UserWarning, match="takes dim 0 of its input for time") as caught:
        largest_difference(
            model, batches, lambda m, x: m(x).square().mean(), PipelineConfig("1f1b", 2)
        )
    assert len(caught) == 2  # one on each stage

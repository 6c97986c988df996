"""Losses of single layers, which the step adds up: wrong on a pipeline, so refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.side_losses import check_no_side_losses
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.block_parity import largest_difference


class Layer(nn.Module):
    """Leaves its gate's map in an attribute, and what is made of it."""

    def __init__(self, keeps: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)
        self.keeps = keeps
        self.map = torch.zeros(())
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.map = torch.softmax(self.gate(x), dim=-1)
        self.kept = self.keeps(self.map.pow(2).sum())
        return x + self.map * self.inner(x)


def plain_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss = plain_loss(model, batch)
    for layer in model.modules():
        kept = getattr(layer, "kept", None)
        if isinstance(kept, Tensor):
            loss = loss + kept
    return loss


def difference(keeps: Any, schedule: str, loss: Any = loss_of) -> float:
    torch.manual_seed(5)
    model = nn.Sequential(Layer(keeps), Layer(keeps), Layer(lambda _: None), nn.Linear(4, 4))
    batches = list(torch.randn(2, 4, 4, dtype=torch.float64))
    return largest_difference(model.double(), batches, loss, PipelineConfig(schedule, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("keeps", [lambda t: t, lambda t: {"losses": [t]}], ids=["bare", "held"])
def test_a_loss_of_a_layer_is_refused_where_the_step_could_not_add_it(
    schedule: str, keeps: Any
) -> None:
    with pytest.raises(ValueError, match=r"stage 0 leaves .*'0.kept'.*return it.*detach"):
        difference(keeps, schedule)


def test_what_is_there_to_be_looked_at_may_stay() -> None:
    # The map is on the way to the output, the sum is without gradients.
    assert difference(lambda total: total.item(), "1f1b", plain_loss) < 1e-13


def test_casts_of_parameters_are_no_losses() -> None:
    """A step in half precision may leave some of them unused."""
    layer = nn.Linear(4, 4)
    layer._parameters["bias"] = layer.bias.to(torch.bfloat16)  # type: ignore[assignment]
    check_no_side_losses(layer, 0, F.linear(torch.ones(2, 4), layer.weight))

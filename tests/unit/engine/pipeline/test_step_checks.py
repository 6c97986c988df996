"""Steps that stages get wrong are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.step_checks import (
    CallNotes,
    ModuleCalls,
    check_calls,
    check_no_side_losses,
)
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


def penalised(loss: Tensor, batch: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
    return loss + slope.square().sum()


def by_input(model: nn.Module, batch: Tensor) -> Tensor:
    return penalised(model(batch.requires_grad_()).square().mean(), batch)


def by_input_and_target(model: nn.Module, batch: Tensor) -> Tensor:
    return penalised(plain_loss(model, batch.requires_grad_()), batch)


@pytest.mark.parametrize("loss", [by_input, by_input_and_target])
def test_a_gradient_by_the_model_s_input_says_what_can_have_it(loss: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    batches = [torch.ones(4, 4, dtype=torch.float64)]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        largest_difference(model, batches, loss, PipelineConfig("1f1b", 2))
    assert "gradient penalty" in "\n".join([str(caught.value), *caught.value.__notes__])


def reads_embeddings(model: nn.Module, batch: Tensor) -> Tensor:
    start = batch.clone().requires_grad_()
    wide = start * 2.0  # its gradients come with the backward, by both ways
    return F.mse_loss(model(wide), wide)


def test_what_the_model_is_called_with_may_have_gradients() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers).double()
    batches = [torch.ones(4, 4, dtype=torch.float64)] * 2
    for schedule in ("1f1b", "zbv"):
        assert (
            largest_difference(model, batches, reads_embeddings, PipelineConfig(schedule, 2))
            < 1e-13
        )


def test_what_is_there_to_be_looked_at_may_stay() -> None:
    # The map is on the way to the output, the sum is without gradients.
    assert difference(lambda total: total.item(), "1f1b", plain_loss) < 1e-13


def test_casts_of_parameters_are_no_losses() -> None:
    """A step in half precision may leave some of them unused."""
    layer = nn.Linear(4, 4)
    layer._parameters["bias"] = layer.bias.to(torch.bfloat16)  # type: ignore[assignment]
    check_no_side_losses(layer, 0, F.linear(torch.ones(2, 4), layer.weight))


def notes_of(*calls: tuple[int, Any]) -> CallNotes:
    noting = ModuleCalls()
    noting.begin_batch()
    for index, call in calls:
        noting.note(index, call)
    notes = noting.take()
    assert notes is not None
    return notes


def test_calls_that_differ_by_rounding_are_the_same() -> None:
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    ids, mixed = torch.arange(4), torch.ones(2, dtype=torch.complex64)
    last = notes_of((0, ((x, ids), {"z": mixed})), (1, ((x,), {})))
    near = notes_of((0, ((x + 1e-9, ids), {"z": mixed})), (1, ((x,), {})))
    check_calls(near, last, [0])
    twice = notes_of((0, ((2 * x, ids), {"z": mixed})), (0, ((x, ids), {"z": mixed})))
    check_calls(notes_of((0, ((x, ids), {"z": mixed}))), twice, [0])  # the last stage's come last
    nan = notes_of((0, ((x * math.nan,), {})))
    check_calls(nan, nan, [0])


@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids: (x + 1e-2, ids),
        lambda x, ids: (x.flip(0), ids),
        lambda x, ids: (x, ids.roll(1)),
        lambda x, ids: (x[:, None], ids),
        lambda x, ids: (x,),
    ],
)
def test_calls_with_other_values_are_refused(change: Callable[[Tensor, Tensor], Any]) -> None:
    x, ids = torch.linspace(-1, 1, 50), torch.arange(4)
    own = notes_of((0, (x, ids)), (0, change(x, ids)))
    with pytest.raises(ValueError, match=r"On stage 3 `training_step` calls the pipelined module"):
        check_calls(own, notes_of((0, (x, ids))), [1, 3])


def test_only_the_first_batches_are_compared() -> None:
    noting = ModuleCalls()
    noting.note(0, torch.ones(1))
    assert noting.take() is None
    found = []
    for _ in range(6):
        noting.begin_batch()
        noting.note(0, (torch.ones(1), torch.ones(1, device="meta")))
        found.append(noting.take())
    assert [notes is not None for notes in found] == [True] * 4 + [False] * 2
    first = found[0]
    assert first is not None
    assert first[0][0][1] is None


def test_a_loss_may_not_use_weights_of_an_earlier_stage_of_the_rank() -> None:
    """Under ``zbv`` the rank of the last stage has the first one, too."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    batches = list(torch.randn(2, 8, 4, dtype=torch.float64))

    def penalised(module: nn.Module, batch: Tensor, layer: int = 0) -> Tensor:
        loss = plain_loss(module, batch)
        return loss + module[layer].weight.square().mean()

    config = PipelineConfig("zbv", 2)
    with pytest.raises(ValueError, match=r"the parameter '0.weight' of an earlier stage"):
        largest_difference(model, batches, penalised, config)
    assert largest_difference(model, batches, partial(penalised, layer=3), config) < 1e-13

    def logged(module: nn.Module, batch: Tensor) -> Tensor:
        loss = plain_loss(module, batch)
        return loss + module[0].weight.detach().norm() * 0.0

    assert largest_difference(model, batches, logged, config) < 1e-13

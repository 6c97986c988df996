"""What a step sees of the layers that another rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import cut, remote_layers
from lightning_dist.engine.splitting.layers import LayerSequence
from lightning_dist.engine.splitting.remote_layer import describe
from tests.helpers.block_parity import largest_difference

WEIGHT, TOTAL = r"'inner.weight' of layer '\d'", r"'total' of layer '\d'"
CPU = torch.device("cpu")


class Layer(nn.Module):
    total = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kind = "odd"
        self.register_buffer("ones", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.total = x.detach().sum().item()
        return x + torch.tanh(self.inner(x))


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Layer(), Layer(), Layer(), nn.LayerNorm(4)).double()


def difference(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> float:
    batches = list(torch.randn(2, 8, 4, dtype=torch.float64))
    return largest_difference(model, batches, loss_of, PipelineConfig("1f1b", 2))


def test_a_step_may_ask_the_whole_model_what_it_is() -> None:
    names = [name for name, _ in build().named_parameters()]

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        assert [name for name, _ in model.named_parameters()] == names
        assert sum(p.numel() for p in model.parameters()) == 3 * 20 + 8
        assert len(list(model.buffers())) == 3
        layers = [m for m in model.modules() if isinstance(m, Layer)]
        assert [layer.kind for layer in layers] == ["odd"] * 3
        weight = next(model.parameters())
        return F.mse_loss(model(batch.to(weight.device, weight.dtype)), batch)

    assert difference(build(), loss_of) < 1e-13


@pytest.mark.parametrize(
    ("addend", "message"),
    [
        (lambda m: sum(p.norm() for p in m.parameters()), WEIGHT),
        (lambda m: m[0].inner.weight.sum(), WEIGHT),
        (
            lambda m: sum(getattr(part, "total", 0.0) for part in m.modules()),
            TOTAL,
        ),
        (lambda m: sum(part.total for part in m if hasattr(part, "total")), TOTAL),
    ],
    ids=["parameters", "one weight", "modules", "children"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_that_needs_what_is_elsewhere_is_refused(
    addend: Callable[[Any], Any], message: str, is_late: bool
) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        early = 0.0 if is_late else addend(model)
        loss = F.mse_loss(model(batch), batch)
        return loss + (addend(model) if is_late else early)

    with pytest.raises(ValueError, match=rf"{message} .*on stage \d"):
        difference(build(), loss_of)


def test_beside_a_step_a_module_shows_what_this_rank_has() -> None:
    model = build()
    cut(model, [3, 1], [1])
    layers = LayerSequence(model)
    layers.attach(CPU)
    assert [name for name, _ in model.named_parameters()] == ["3.weight", "3.bias"]
    with layers.in_step(is_last=False):
        assert len(list(model.parameters())) == 8
    assert len(list(model.parameters())) == 2
    layers.detach()
    with layers.in_step(is_last=False):
        assert len(list(model.parameters())) == 2


def test_says_what_the_layer_computes_in() -> None:
    model = build()
    cut(model, [3, 1], [1])
    layer = remote_layers(model)[0][2]
    layer.compute_dtypes = {n: torch.bfloat16 for n, _ in layer.skeleton.named_parameters()}
    assert {p.dtype for p in describe(layer, CPU).parameters()} == {torch.bfloat16}


def test_parts_are_found_by_their_places_in_a_layer_too() -> None:
    model = nn.Sequential(*(nn.Sequential(Layer(), nn.LayerNorm(4)) for _ in range(2))).double()
    cut(model, [1, 1], [1])
    layers = LayerSequence(model)
    with pytest.raises(AttributeError, match="layer '0' was asked for"):
        model[0][1].eval()
    layers.attach(CPU)
    assert [type(part) for part in model[0]] == [Layer, nn.LayerNorm]
    assert not model[0][1].eval().training
    layers.detach()


def test_is_as_long_and_as_true_as_the_layer() -> None:
    model = nn.Sequential(Layer(), nn.Sequential(), nn.Sequential(Layer()), Layer()).double()
    truths = [bool(layer) for layer in model]
    cut(model, [3, 1], [1])
    assert [bool(layer) for layer in model] == truths == [True, False, True, True]
    assert [len(layer) for layer in model[1:3]] == [0, 1]
    with pytest.raises(TypeError, match=r"'Layer' has no len\(\)"):
        len(model[0])

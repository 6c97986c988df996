"""Which parameters count as used behind the pipelined module, by what forwards mention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.find_layers import find_layers
from lightning_dist.engine.splitting.find_loss_parameters import (
    holds_layers,
    not_ahead,
    not_in_a_forward,
    refuse_cuts,
    trainable_outside,
)


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
        self.head = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.of_loss = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        return self.read(self.net(self.embed(x))) * scale

    def read(self, x: Tensor) -> Tensor:
        return self.head(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = User()
        self.projection = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("name", "is_mentioned", "is_ahead"),
    [
        ("user.embed.weight", True, True),
        ("user.head.weight", True, False),
        ("user.scale", True, False),
        ("user.of_loss", False, False),
        ("projection.weight", False, False),
    ],
)
def test_a_forward_tells_what_it_uses_and_where(
    name: str, is_mentioned: bool, is_ahead: bool
) -> None:
    assert not_in_a_forward(Outer(), "user.net", name) is not is_mentioned
    assert not_ahead(Outer(), "user.net", name) is not is_ahead


def test_a_forward_without_source_tells_nothing() -> None:
    made: dict[str, type[nn.Module]] = {}
    exec("class Made(Base):\n    def forward(self, x):\n        return x", {"Base": User}, made)
    assert not not_in_a_forward(made["Made"](), "net", "of_loss")
    assert not not_ahead(made["Made"](), "net", "of_loss")


def test_the_module_must_hold_more_than_half() -> None:
    outer = Outer()
    outside = trainable_outside(outer, "user")
    assert outside.keys() == {"projection.weight", "projection.bias"}
    assert holds_layers(outer, "user", not_in_a_forward)
    outer.projection = nn.Linear(2, 30)
    assert not holds_layers(outer, "user", not_in_a_forward)
    outer.projection.requires_grad_(False)
    assert holds_layers(outer, "user", not_in_a_forward)


class OfSteps(User):
    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.net(x))


def test_a_named_module_need_not_hold_them() -> None:
    user = OfSteps()
    _, layers = find_layers(user, "net")
    assert layers.loss_parameters.names == trainable_outside(user, "net").keys()
    refuse_cuts(layers, "net", ["net.0.weight"])
    with pytest.raises(
        ValueError, match=r"Leave \['head.weight'\] out of the tensor-parallel plan"
    ):
        refuse_cuts(layers, "net", ["net.0.weight", "head.weight"])

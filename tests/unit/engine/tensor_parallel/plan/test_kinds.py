"""Which modules count as one kind, of which one is proven for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.engine.tensor_parallel.plan.trial_run import kind_of

CONFIG = SimpleNamespace(act="gelu")


class Layer(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.setting = setting


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SimpleNamespace(act="gelu"), SimpleNamespace(act="softmax")),
        (["gelu"], ["gelu", "softmax"]),
        ({"act": ("gelu", 1)}, {"act": ("gelu", 2)}),
        (torch.relu, torch.tanh),
        (torch.float32, torch.bfloat16),
        (1.0, 2.0),
    ],
    ids=["objects", "lists", "mappings", "functions", "dtypes", "numbers"],
)
def test_layers_that_may_decide_otherwise_are_of_two_kinds(one: Any, other: Any) -> None:
    assert kind_of(Layer(one)) != kind_of(Layer(other))


@pytest.mark.parametrize(
    "settings",
    [(CONFIG, CONFIG), (["gelu", 1], ["gelu", 1]), ({"a": [1]}, {"a": [1]}), (None, None)],
    ids=["one object", "lists", "mappings", "nothing"],
)
def test_layers_of_the_same_settings_are_of_one_kind(settings: Any) -> None:
    one, other = map(Layer, settings)
    assert kind_of(one) == kind_of(other)
    assert kind_of(one) != kind_of(other.eval())

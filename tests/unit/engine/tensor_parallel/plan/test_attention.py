from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from tests.helpers.networks.attentions import ATTENTIONS
from tests.unit.engine.tensor_parallel.plan.parts import (
    ATTENTION,
    MLP,
    WIDTH,
    Adapted,
    RMSNorm,
    Separate,
    holder,
    mlp,
    plan_of,
)


class Fused(nn.Module):
    """Query, key and value in one layer."""

    def __init__(self, features: int, name: str = "qkv") -> None:
        super().__init__()
        self.num_heads = 4
        self.add_module(name, nn.Linear(WIDTH, features))
        self.proj = nn.Linear(WIDTH, WIDTH)


class TakesBias(Separate):
    def forward(self, x: Tensor, position_bias: Tensor) -> Tensor:
        return x


class AsksConfig(Separate):
    def __init__(self) -> None:
        super().__init__(config=SimpleNamespace(num_heads=4), head_dim=3)
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).view(*x.shape[:2], self.config.num_heads, -1)


class WritesWidth(Separate):
    """Has the width of all heads in its code, where nothing can change it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.q(x).view(batch, length, self.num_heads, WIDTH // self.num_heads)
        return self.o(heads.flatten(2))


class AddsInput(Separate):
    """Uses more of its input than the width."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        return x + self.o(self.q(x).view(batch, length, width))


class ScalesByWidth(Separate):
    def __init__(self) -> None:
        super().__init__(n_embd=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) * self.n_embd**-0.5)


class NeedsMore(Separate):
    """Cannot be run with what can be guessed."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        batch, length, width = x.size()
        return self.o((self.q(x) + state["more"]).view(batch, length, width))


class KnowsHeadSize(Separate):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(head_dim=3, **attributes)
        del self.num_heads


def beside_an_mlp(attention: nn.Module, tp_size: int = 1) -> dict[str, str]:
    """What is found of an attention, in a model where something is found in any case."""
    plan = plan_of(holder(attention=attention, mlp=mlp()), tp_size)
    assert {name: plan.pop(name) for name in MLP} == MLP
    return plan


@pytest.mark.parametrize(
    "attention",
    [
        Separate(),
        Separate(kv_size=6),
        Separate(mask=nn.Buffer(torch.ones(1, 1, 8, 8))),
        Separate(rotary=holder(inv_freq=nn.Buffer(torch.ones(4)))),
        KnowsHeadSize(),
        KnowsHeadSize(layer_idx=4),
        KnowsHeadSize(sliding_window=4),
    ],
    ids=["separate", "grouped", "mask", "rotary", "head-size", "layer-index", "window"],
)
def test_an_attention_of_separate_projections(attention: nn.Module) -> None:
    assert beside_an_mlp(attention) == ATTENTION


def test_a_norm_of_each_head_gets_each_rank_s_part_of_the_gradient() -> None:
    plan = beside_an_mlp(Separate(q_norm=RMSNorm(3)))
    assert plan == ATTENTION | {"attention.q_norm": "local"}


@pytest.mark.parametrize("name", ["qkv", "query_key_value", "c_attn", "Wqkv"])
def test_an_attention_of_one_fused_projection(name: str) -> None:
    plan = beside_an_mlp(Fused(3 * WIDTH, name))
    assert plan == {f"attention.{name}": "colwise", "attention.proj": "rowwise"}


@pytest.mark.parametrize(
    "attention",
    [
        Fused(2 * WIDTH),
        Fused(2 * WIDTH, "query_key_value"),
        Separate(kv_size=5),
        Separate(q_norm=RMSNorm(WIDTH)),
        Separate(gate=nn.Parameter(torch.ones(4))),
        Separate(bias_of_heads=nn.Embedding(8, 4)),
        Separate(slopes=nn.Buffer(torch.ones(4, 1, 1))),
        Separate(more=nn.Linear(WIDTH, WIDTH)),
        Separate(n_groups_of_keys=4),
        Separate(q=Adapted(WIDTH, WIDTH)),
        Separate(num_heads=None),
        TakesBias(),
        AsksConfig(),
        WritesWidth(),
        AddsInput(),
        ScalesByWidth(),
        NeedsMore(),
        nn.MultiheadAttention(WIDTH, 4),
    ],
    ids=[
        "fused-grouped",
        "interleaved-grouped",
        "uneven",
        "norm-of-all",
        "gate",
        "bias-of-heads",
        "slopes",
        "unknown-layer",
        "unknown-count",
        "adapter",
        "no-count",
        "passed-bias",
        "count-in-config",
        "writes-width",
        "adds-input",
        "scales-by-width",
        "needs-more",
        "torch",
    ],
)
def test_an_attention_that_is_not_surely_usual_stays_whole(attention: nn.Module) -> None:
    assert beside_an_mlp(attention, tp_size=2) == {}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_as_people_write_them_are_cut(name: str) -> None:
    attention = ATTENTIONS[name]()
    found = find_plan(holder(attn=attention), tp_size=2).styles
    layers = {f"attn.{n}" for n, part in attention.named_modules() if isinstance(part, nn.Linear)}
    assert {layer for layer, style in found.items() if style.cuts_a_matrix} == layers


def test_the_layout_of_bert() -> None:
    attention = Separate()
    del attention.o
    output = holder(dense=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH))
    block = holder(
        attention=holder(**{"self": attention}, output=output),
        intermediate=holder(dense=nn.Linear(WIDTH, 20)),
        output=holder(dense=nn.Linear(20, WIDTH), norm=nn.LayerNorm(WIDTH)),
    )
    assert plan_of(block) == {
        "attention.self.q": "colwise",
        "attention.self.k": "colwise",
        "attention.self.v": "colwise",
        "attention.output.dense": "rowwise",
        "intermediate.dense": "colwise",
        "output.dense": "rowwise",
    }

"""The first table of a run: what is sharded, and why the rest is whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensor_parallel.summary import describe_plan
from recipes.gpt import GPT
from tests.helpers.networks.attentions import GPT as Written
from tests.helpers.networks.attentions import WIDTH, Fused, NanoGPT, ViT

TP = 2


def table_of(module: nn.Module) -> str:
    found = find_plan(module, TP)
    return str(describe_plan(module, found.styles, found.reasons))


def test_what_was_found_is_said_once_for_all_layers() -> None:
    assert table_of(GPT(depth=3)).splitlines() == [
        "embedding: model.*.token (vocab)",
        "attention: model.*.attention.qkv (colwise), model.*.attention.out (rowwise)",
        "mlp: model.*.up (colwise), model.*.down (rowwise)",
        "head: model.*.logits (colwise_gather)",
        "replicated, less than 1% for each reason:"
        " model.*.attention_norm, model.*.mlp_norm, model.*.norm",
    ]


def with_attention(attention: nn.Module) -> nn.Module:
    return Written(lambda: attention, depth=1)


class WritesWidth(NanoGPT):
    """Has the width in its code."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        return self.c_proj(q + k + v)


class OddHeads(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 3
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 18), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, -1)
        return self.c_proj(heads[:, :, 0].reshape(B, T, -1)) + x.new_zeros(C)


class NeedsMore(NanoGPT):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        B, T, C = x.shape
        return self.c_proj((self.c_attn(x)[..., :C] + state["more"]).view(B, T, C))


class AsksConfig(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=4)
        self.head_dim = 4
        del self.n_head

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_attn(x)[..., : self.config.n_head * self.head_dim])


class Knows(Fused):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_attn(x).chunk(3, dim=-1)[0])


class TakesBias(Knows):
    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> Tensor:
        return super().forward(x)


def grouped() -> nn.Module:
    return Knows(c_attn=nn.Linear(WIDTH, 2 * WIDTH))


ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "width in the code": (WritesWidth, "cannot compute with a part of its features"),
    "cannot be run": (NeedsMore, "computes with the width of all heads, and could not be run"),
    "count in the config": (AsksConfig, "counts its heads in more than one place; read only self."),
    "odd heads": (
        OddHeads,
        "Use a tp_size of [1, 3], or another number of heads, or a plan={...} without the"
        " attention: the n_head=3 of",
    ),
    "one key head": (
        lambda: Knows(num_key_value_heads=1),
        "no number of ranks divides its heads (n_head=4, num_key_value_heads=1)",
    ),
    "no count": (lambda: Knows(n_head=None), "does not say in an attribute how many heads it has"),
    "odd count": (lambda: Knows(n_head=3), "its 3 heads do not divide the 16 features"),
    "gate": (lambda: Knows(gate=nn.Parameter(torch.ones(4))), "its gate is no projection's"),
    "slopes": (lambda: Knows(slopes=nn.Buffer(torch.ones(4, 1, 1))), "its buffer slopes may be of"),
    "bias": (TakesBias, "it is given a bias for each head (position_bias)"),
    "grouped": (
        grouped,
        "its c_attn give 32 features, and its output projection takes 16",
    ),
    "torch": (lambda: nn.MultiheadAttention(WIDTH, 4), "uses its weights itself; write nn.Linear"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_that_is_replicated_has_its_reason(name: str) -> None:
    make, reason = ATTENTIONS[name]
    (line,) = [
        part
        for part in table_of(with_attention(make())).splitlines()
        if "attn." in part or ".attn (" in part
    ]
    assert line.startswith("replicated: transformer.h.*.attn")
    assert "% of the parameters): " in line
    assert reason in line


class Two(nn.Module):
    """What is sharded in any case, and something else."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.attn, self.other = ViT(), other


def mlp(*between: nn.Module, hidden: int = 20, taken: int = 20) -> nn.Module:
    part = nn.Module()
    part.fc1, part.fc2 = nn.Linear(WIDTH, hidden), nn.Linear(taken, WIDTH)
    part.between = nn.ModuleList(between)
    return part


def vocabulary(rows: int, *heads: nn.Module) -> nn.Module:
    part = nn.Module()
    part.tokens, part.heads = nn.Embedding(rows, WIDTH), nn.ModuleList(heads)
    return part


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm in an MLP": (lambda: mlp(nn.LayerNorm(20)), "other parameters beside fc1 and fc2"),
    "uneven MLP": (lambda: mlp(taken=40), "fc1 do not give what fc2 takes"),
    "odd vocabulary": (lambda: vocabulary(31), "its 31 rows do not divide by tp_size=2; pad them"),
    "no head": (lambda: vocabulary(30), "no layer has an output for each of its 30 rows"),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), "convolutions are not sharded"),
    "LSTM": (lambda: nn.LSTM(4, 4), "an LSTM needs all features of its state"),
    "linear": (lambda: nn.Linear(9, 5), "name it and its partner in plan={...}"),
    "bilinear": (lambda: nn.Bilinear(9, 5, 3), "a Bilinear is not sharded"),
    "norm": (lambda: nn.BatchNorm1d(99), "a BatchNorm1d works on what all ranks have"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_part_has_its_reason(name: str) -> None:
    make, reason = OTHERS[name]
    lines = [line for line in table_of(Two(make())).splitlines() if ": other" in line]
    assert any(reason in line for line in lines)
    assert all(line.startswith("replicated: other") for line in lines)


def test_shares_are_of_all_parameters_and_a_tied_one_counts_once() -> None:
    model = Two(nn.Linear(30, 10, bias=False))
    model.again = model.other
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"replicated: other ({300 / total:.0%} of the parameters)" in table_of(model)


def test_the_largest_part_is_one_line_and_small_ones_are_none() -> None:
    def largest_of(module: nn.Module) -> str:
        found = find_plan(module, TP)
        return describe_plan(module, found.styles, found.reasons).largest

    assert largest_of(GPT(depth=3)) == ""
    model = Two(nn.Linear(30, 10, bias=False))
    alone = largest_of(model)
    assert alone.startswith("replicated: other (")
    model.small = nn.Embedding(3, 30)
    line = largest_of(model)
    assert line.startswith("replicated: other (")
    assert line.endswith("% more: trainer.strategy.describe()")
    assert "\n" not in line


def test_a_plan_of_the_module_s_own_is_its_reason() -> None:
    class Own(Two):
        def tensor_parallel_plan(self) -> dict[str, str]:
            return {"attn.qkv": "colwise", "attn.proj": "rowwise", "attn.*_norm": "local"}

    assert "): tensor_parallel_plan() does not name it" in table_of(Own(nn.Linear(30, 10)))


def test_where_nothing_is_found_the_first_reason_is_said() -> None:
    with pytest.raises(ValueError, match=r"'fc1' is replicated: other parameters beside fc1"):
        find_plan(mlp(nn.LayerNorm(20)), TP)

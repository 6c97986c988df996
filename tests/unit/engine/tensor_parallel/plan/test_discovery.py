from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from recipes.gpt import build_gpt
from tests.helpers.networks.attentions import ATTENTIONS

WIDTH = 12
MLP = {"mlp.up": "colwise", "mlp.down": "rowwise"}
ATTENTION = {
    "attention.q": "colwise",
    "attention.k": "colwise",
    "attention.v": "colwise",
    "attention.o": "rowwise",
}


def plan_of(module: nn.Module, tp_size: int = 1) -> dict[str, str]:
    return {name: style.value for name, style in find_plan(module, tp_size).styles.items()}


def holder(**children: Any) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


class Separate(nn.Module):
    """Query, key and value apart."""

    def __init__(self, kv_size: int = WIDTH, **attributes: Any) -> None:
        super().__init__()
        self.num_heads = 4
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_size)
        self.v = nn.Linear(WIDTH, kv_size)
        self.o = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x


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


class Adapted(nn.Linear):
    """Computes more than an nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def mlp(hidden: int = 20, **more: nn.Module) -> nn.Module:
    return holder(up=nn.Linear(WIDTH, hidden), **more, down=nn.Linear(hidden, WIDTH))


def beside_an_mlp(attention: nn.Module, tp_size: int = 1) -> dict[str, str]:
    """What is found of an attention, in a model where something is found in any case."""
    plan = plan_of(holder(attention=attention, mlp=mlp()), tp_size)
    assert {name: plan.pop(name) for name in MLP} == MLP
    return plan


def test_the_recipe_is_spread_wholly() -> None:
    plan = plan_of(build_gpt(depth=1))
    assert plan == {
        "0.token": "vocab",
        "1.attention.qkv": "colwise",
        "1.attention.out": "rowwise",
        "1.up": "colwise",
        "1.down": "rowwise",
        "2.logits": "colwise_gather",
    }
    assert list(plan) == [name for name, _ in build_gpt(depth=1).named_modules() if name in plan]


def test_the_module_s_own_plan_counts() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp()
            self.tower = mlp()

        def tensor_parallel_plan(self) -> dict[str, str]:
            return {"tower.up": "colwise", "tower.down": "rowwise"}

    assert plan_of(Own()) == {"tower.up": "colwise", "tower.down": "rowwise"}


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


def test_the_mlp_of_torch_s_layer_is_found_beside_its_attention() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=20)
    assert plan_of(layer) == {"linear1": "colwise", "linear2": "rowwise"}


def test_an_mlp_in_a_sequential_is_found_by_its_order() -> None:
    layers = [nn.Linear(WIDTH, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, WIDTH)]
    assert plan_of(nn.Sequential(*layers)) == {"0": "colwise", "3": "rowwise"}


def test_a_gate_may_be_apart_or_stacked() -> None:
    apart = holder(
        gate_proj=nn.Linear(WIDTH, 20), up_proj=nn.Linear(WIDTH, 20), down_proj=nn.Linear(20, WIDTH)
    )
    assert plan_of(apart) == {
        "gate_proj": "colwise",
        "up_proj": "colwise",
        "down_proj": "rowwise",
    }
    stacked = holder(gate_up_proj=nn.Linear(WIDTH, 40), down_proj=nn.Linear(20, WIDTH))
    assert plan_of(stacked) == {"gate_up_proj": "colwise", "down_proj": "rowwise"}


@pytest.mark.parametrize(
    "module",
    [
        mlp(norm=nn.LayerNorm(20)),
        mlp(activation=nn.PReLU()),
        mlp(convolution=nn.Conv1d(20, 20, 3, groups=20)),
        holder(up=nn.Linear(WIDTH, 20), down=nn.Linear(20, 5)),
        holder(up=nn.Linear(WIDTH, 40), down=nn.Linear(20, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, 20), nn.Softmax(dim=-1), nn.Linear(20, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, 20), nn.PReLU(), nn.Linear(20, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, 20), nn.LayerNorm(20), nn.Linear(20, WIDTH)),
    ],
    ids=["norm", "prelu", "conv", "narrow", "halved", "softmax", "seq-prelu", "seq-norm"],
)
def test_an_mlp_with_more_between_its_layers_stays_whole(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="No tensor-parallel plan was found"):
        find_plan(module)


def language_model(rows: int = 30, **more: nn.Module) -> nn.Module:
    return holder(tokens=nn.Embedding(rows, WIDTH), positions=nn.Embedding(64, WIDTH), **more)


def test_embedding_and_head_are_the_two_of_one_size() -> None:
    tied = language_model(pooler=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 30))
    assert plan_of(tied) == {"tokens": "vocab", "head": "colwise_gather"}
    tied.head.weight = tied.tokens.weight
    assert plan_of(tied, tp_size=2) == {"tokens": "vocab", "head": "colwise_gather"}


def test_a_weight_that_another_layer_uses_too_stays_whole() -> None:
    odd = language_model(mlp=mlp(), head=nn.Linear(WIDTH, 30), user=Adapted(WIDTH, 30))
    odd.user.weight = odd.tokens.weight
    assert plan_of(odd) == MLP | {"head": "colwise_gather"}


def test_an_embedding_without_a_head_may_be_the_head_itself() -> None:
    assert plan_of(language_model(mlp=mlp())) == MLP


def test_a_vocabulary_that_cannot_be_shared_out_stays_whole() -> None:
    model = language_model(rows=31, mlp=mlp(), head=nn.Linear(WIDTH, 31))
    assert plan_of(model, tp_size=2) == MLP
    assert plan_of(model, tp_size=31).keys() == {*MLP, "tokens", "head"}


class HuggingFace(nn.Module):
    """Looks like a model of transformers."""

    def __init__(self, plan: dict[str, str], **children: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=None)
        self._tp_plan = plan
        self.layers = nn.ModuleList([holder(**children)])

    def get_output_embeddings(self) -> None:
        return None


LLAMA = {
    "layers.*.attention.q": "colwise",
    "layers.*.attention.k": "colwise",
    "layers.*.attention.v": "colwise",
    "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attention.o": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}


def test_a_built_in_plan_is_translated_under_the_model_s_name() -> None:
    model = HuggingFace(LLAMA, attention=Separate(q_norm=RMSNorm(3)), mlp=mlp())
    plan = plan_of(holder(model=model))
    inner = ATTENTION | {"attention.q_norm": "local"} | MLP
    assert plan == {f"model.layers.0.{name}": style for name, style in inner.items()}


def test_a_plan_can_be_in_the_config() -> None:
    model = HuggingFace({}, attention=Separate(), mlp=mlp())
    model.config.base_model_tp_plan = LLAMA
    assert plan_of(model).keys() == {f"layers.0.{name}" for name in ATTENTION | MLP}


def test_only_what_the_plan_names_is_spread() -> None:
    plan = {pattern: style for pattern, style in LLAMA.items() if "mlp" in pattern}
    model = HuggingFace(plan, attention=Separate(), mlp=mlp())
    assert plan_of(model).keys() == {f"layers.0.{name}" for name in MLP}


def test_layers_with_a_style_of_their_own_stay_whole_with_their_partners() -> None:
    plan = LLAMA | {"layers.*.attention.k": "mla_kv_a_proj"}
    model = HuggingFace(plan, attention=Separate(), mlp=mlp())
    assert plan_of(model).keys() == {f"layers.0.{name}" for name in MLP}


def test_a_norm_between_the_layers_that_a_plan_forgets_keeps_them_whole() -> None:
    model = HuggingFace(LLAMA, attention=Separate(), mlp=mlp(norm=RMSNorm(20)))
    assert plan_of(model).keys() == {f"layers.0.{name}" for name in ATTENTION}


def test_experts_stay_whole() -> None:
    experts = nn.Module()
    experts.up = nn.Parameter(torch.ones(4, 12, 12))
    plan = LLAMA | {"layers.*.mlp.experts": "moe_experts", "layers.*.mlp.experts.up": "colwise"}
    model = HuggingFace(plan, attention=Separate(), mlp=mlp(experts=experts))
    assert plan_of(model).keys() == {f"layers.0.{name}" for name in ATTENTION}


def test_a_fused_gate_is_cut_where_the_plan_joins_it() -> None:
    plan = {
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }
    gated = holder(gate_up_proj=nn.Linear(WIDTH, 40), down_proj=nn.Linear(20, WIDTH))
    assert plan_of(HuggingFace(plan, mlp=gated)) == {
        "layers.0.mlp.gate_up_proj": "colwise",
        "layers.0.mlp.down_proj": "rowwise",
    }


def test_an_error_says_what_there_is_and_what_to_do() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x, x))

    message = r"^Pass plan=.* tensor_parallel_plan\(\).* for Odd: .*There are: Odd, Bilinear\."
    with pytest.raises(ValueError, match=message):
        find_plan(Odd())

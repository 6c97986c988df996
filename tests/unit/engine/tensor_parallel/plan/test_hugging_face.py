from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.unit.engine.tensor_parallel.plan.parts import (
    ATTENTION,
    MLP,
    WIDTH,
    RMSNorm,
    Separate,
    holder,
    mlp,
    plan_of,
)


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

from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from tests.unit.engine.tensor_parallel.plan.parts import (
    WIDTH,
    holder,
    mlp,
    plan_of,
)


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

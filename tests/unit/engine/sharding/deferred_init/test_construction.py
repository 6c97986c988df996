from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.gpt import GPT
from tests.unit.engine.sharding.deferred_init.ordinary import (
    assert_equal_to_ordinary,
    init_weights,
)


def skipped() -> nn.Module:
    layer = nn.utils.skip_init(nn.Linear, 4, 3)  # draws nothing
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.Linear(3, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "bfloat16": lambda: nn.Linear(5, 3, dtype=torch.bfloat16),
    "conv": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "layer_norm": lambda: nn.LayerNorm(4),
    "embedding": lambda: nn.Embedding(7, 4, padding_idx=2),
    "attention": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2
    ),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "gpt": lambda: GPT(width=16, depth=2),
    "half": lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half(),
    "skip_init": skipped,
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_modules_are_those_of_ordinary_construction(build: Callable[[], nn.Module]) -> None:
    assert_equal_to_ordinary(build)


def test_buffers_of_batch_norm() -> None:
    assert_equal_to_ordinary(lambda: nn.BatchNorm2d(3), ["num_batches_tracked"])


INITS: dict[str, Callable[[Tensor], Any]] = {
    "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_near": lambda w: nn.init.trunc_normal_(w, a=-0.8, b=0.9),
    "trunc_normal_far": lambda w: nn.init.trunc_normal_(w, a=2.0, b=3.0),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.3),
    "eye_": nn.init.eye_,
    "dirac_": lambda w: nn.init.dirac_(w.view(*w.shape, 1)),
    "constant_": lambda w: nn.init.constant_(w, 0.5),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
@pytest.mark.parametrize("size", [(20, 30), (30, 20)])
def test_initializers(init: Callable[[Tensor], Any], size: tuple[int, int]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(*size), nn.Linear(2, 2))
        init(model[0].weight)
        return model

    assert_equal_to_ordinary(build)


def applied() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).apply(init_weights)


def changed_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(3, 4))
    first, second, table = model
    first.weight.data.mul_(0.5)
    with torch.no_grad():
        first.weight[0].fill_(3.0)
        first.weight[1, 1:3] = torch.arange(2.0)
        first.weight[2] = 7.0
        second.weight.copy_(first.weight.t())
        second.weight[second.weight > 0.2] *= -1.0
        table.weight[1] = second.bias
        first.bias.data = second.bias.data * 2
    first.bias.requires_grad_(False)
    return model


def copied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(2)), nn.Linear(3, 1)])


def loaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = {k: np.arange(6, dtype=np.float32)[: v.numel()] for k, v in model.state_dict().items()}
    state = {k: torch.from_numpy(v).view(model.state_dict()[k].shape) for k, v in state.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state)
    for tensor in state.values():
        tensor.zero_()  # the tape has its own copy
    return model


def drop_path() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    rates += [r.item() for r in torch.linspace(0, 0.3, 4, device="cpu")]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(int(10 * rates[3]), 2))


BUILDS = {f.__name__: f for f in (applied, changed_in_place, copied, drop_path)}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_constructors_do(build: Callable[[], nn.Module]) -> None:
    assert_equal_to_ordinary(build)


def test_a_state_dict_is_loaded() -> None:
    assert_equal_to_ordinary(loaded, ["1.num_batches_tracked"])

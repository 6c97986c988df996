"""Parameters that modules around blocks hold themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.splitting.blocks.blocks import Blocks
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import cut, layers_of, whole
from lightning_dist.engine.splitting.find_layers import (
    choose_partition,
    find_layers,
)
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.split import find_split
from tests.helpers.block_parity import largest_difference
from tests.helpers.networks.vision import Called, User, Vision, batches, loss_of


class Early(Called):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        return self.head(self.norm(self.blocks(self.embed(x)))[:, 0] * scale)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("model", [Vision, Called, Early])
def test_learns_what_it_learns_alone(model: type[Vision], schedule: str) -> None:
    config = PipelineConfig(schedule, 2, "model.blocks")
    assert largest_difference(model(), batches(), loss_of, config) < 1e-13


@pytest.mark.parametrize("model", [Vision, Called])
def test_they_are_found_and_belong_to_the_first_stage_or_the_last(model: type[Vision]) -> None:
    for stage, names in ((0, {"model.token", "model.places"}), (1, {"model.scale"})):
        user = User(model())
        split = find_split(user, PipelineConfig("1f1b", layers="auto"), 2, stage)
        assert (split.path, len(split.layers)) == ("model", 5)
        split.cut()
        here = {name for name, _ in user.named_parameters() if name.count(".") == 1}
        assert here == names
        assert all(split.keeps(name) for name in names)
        everywhere = {"model.token", "model.places", "model.scale"}
        assert split.remote_names() & everywhere == everywhere - names
        run = layers_of(split.layers, split.layers_per_stage, stage)
        assert {n.rpartition("/")[2] for n, _ in run.named_parameters() if "beside" in n} == {
            name.removeprefix("model.") for name in names
        }
        assert not {id(p) for p in split.tensors_outside(user)}
        with whole(user):  # for other code that sees the whole model
            assert user.model.scale.shape == (4,)
        with split.whole():
            assert user.model.places.shape == (1, 7, 4)
        state = User(model()).state_dict()
        assert user.load_state_dict(state) == ([], [])
        again = find_split(user, PipelineConfig("1f1b", layers="auto"), 2, stage)
        again.cut()
        assert again.remote_names() == split.remote_names()
        for name in names:
            assert torch.equal(user.get_parameter(name), state[name])
        copied = copy.deepcopy(user)
        assert {name for name, _ in copied.named_parameters()} == {
            name for name, _ in user.named_parameters()
        }


def layers_in(model: nn.Module) -> Layers:
    return find_layers(User(model), "auto")[1]


def test_they_count_for_their_stages() -> None:
    model = Called()
    model.places = nn.Parameter(torch.randn(1, 300, 4))
    assert choose_partition(layers_in(model), "parameters", 2) == (1, 4)
    model.scale = nn.Parameter(torch.randn(1200))
    assert choose_partition(layers_in(model), "parameters", 3) == (1, 3, 1)


class GivenToBlocks(Vision):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x)
        for block in self.blocks:
            hidden = block(hidden + self.places[:, : hidden.shape[1]])
        return self.head(hidden * self.scale)[:, 0]


class Behind(Vision):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + self.token)[:, 0]


class TooEarly(Vision):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * self._parameters["scale"]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden * self.scale)[:, 0]


class Deciding(Vision):
    def forward(self, x: Tensor) -> Tensor:
        if self.places.sum() > 100.0:
            x = x * 2.0
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (GivenToBlocks, r"Block 0 .* is given the arguments \['0'\] .*'model.places'"),
        (Behind, r"uses a value from before the blocks of 'blocks' behind them"),
        (TooEarly, r"Block 0 .* is given .*'model.scale'\], which live on the last stage"),
        (Deciding, r"reads a number .*'model.places', .* which live on the first stage"),
    ],
)
def test_other_uses_are_errors(model: type[Vision], message: str) -> None:
    config = PipelineConfig("1f1b", 2, "model.blocks")
    with pytest.raises(ValueError, match=message):
        largest_difference(model(), batches(), loss_of, config)


def test_one_of_another_part_is_refused_and_a_frozen_one_is_everywhere() -> None:
    model = Vision()
    model.norm.weight = nn.Parameter(model.norm.weight.detach())
    model.register_parameter("shared", model.norm.weight)
    with pytest.raises(ValueError, match=r"^Move 'model.shared' .* it is 'model.norm.weight', too"):
        find_layers(User(model), "model.blocks")
    model = Vision()
    model.places.requires_grad_(False)
    _, layers = find_layers(User(model), "model.blocks")
    assert isinstance(layers, Blocks)
    cut(layers, [2, 3], [1])
    assert "places" in dict(model.named_parameters())
    assert "token" not in dict(model.named_parameters())


def test_all_ranks_find_the_same_in_a_later_run() -> None:
    for stage in (0, 1):
        user = User(Called())
        user.model.patches.requires_grad_(False)
        user.model.places.requires_grad_(False)
        config = PipelineConfig("1f1b", layers="model.blocks")
        find_split(user, config, 2, stage).cut()
        assert find_split(user, config, 2, stage).path == "model"


def test_one_that_the_users_module_has_too_is_refused() -> None:
    user = User(Vision())
    user.alias = user.model.token
    with pytest.raises(ValueError, match=r"'model.token' is also 'alias', outside of the"):
        find_split(user, PipelineConfig("1f1b", layers="model.blocks"), 2, 0)


class Collected(Called):
    """Collects and writes what it has of its own."""

    def embed(self, x: Tensor) -> Tensor:
        parts = []
        parts.append(self.token.expand(len(x), -1, -1))
        parts.append(self.patches(x))
        return torch.cat(parts, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden.add_(self.places[:, : hidden.shape[1]])
        hidden = self.norm(self.blocks(hidden)[:, 0])
        return self.head(hidden * self.scale)


class Listed(Called):
    """Has its tokens in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ParameterList([self.token.detach(), self.places.detach()[:, :6]])
        self.gains = nn.ParameterDict({"last": self.scale.detach()})
        del self.token, self.places, self.scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x) + self.tokens[1]
        hidden = torch.cat([self.tokens[0].expand(len(x), -1, -1), hidden], dim=1)
        return self.head(self.norm(self.blocks(hidden)[:, 0]) * self.gains["last"])


class Prompted(Called):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.prompt)


class Alias(Called):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.patches


@pytest.mark.parametrize("model", [Collected, Listed, Prompted, Alias])
def test_other_forms_learn_what_they_learn_alone(model: type[Vision]) -> None:
    config = PipelineConfig("1f1b", 2, "model.blocks")
    assert largest_difference(model(), batches(), loss_of, config) < 1e-13


def test_a_parameter_of_steps_alone_is_on_the_last_stage() -> None:
    model = Called()
    model.temperature = nn.Parameter(torch.ones(()).double())

    def loss_with(module: nn.Module, batch: Any) -> Tensor:
        images, wanted = batch
        return F.cross_entropy(module(images) * module.temperature, wanted)

    config = PipelineConfig("1f1b", 2, "model.blocks")
    assert largest_difference(model, batches(), loss_with, config) < 1e-13


def test_steps_may_not_read_them_on_other_stages() -> None:
    def penalised(module: nn.Module, batch: Any) -> Tensor:
        return loss_of(module, batch) + sum(p.square().sum() for p in module.parameters())

    def of_one(module: nn.Module, batch: Any) -> Tensor:
        return loss_of(module, batch) + module.places.square().sum()

    for loss, name in ((penalised, "lives on"), (of_one, "'places', which lives on the first")):
        config = PipelineConfig("1f1b", 2, "model.blocks")
        with pytest.raises(ValueError, match=name):
            largest_difference(Called(), batches(), loss, config)


def test_a_later_run_finds_the_same_beside_a_head_of_steps() -> None:
    for stage in (0, 1):
        user = User(Called())
        user.head = nn.Sequential(nn.Linear(3, 90), nn.Linear(90, 3))
        find_split(user, PipelineConfig("1f1b", layers="model.blocks"), 2, stage).cut()
        assert find_layers(user, "auto", by_forwards=True)[0] == "model"

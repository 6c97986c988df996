"""Parameters that modules around blocks hold themselves, and sequences that forwards call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.splitting.blocks.block_loop import is_ahead
from lightning_dist.engine.splitting.blocks.blocks import Blocks
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import cut, layers_of
from lightning_dist.engine.splitting.find_layers import (
    LayersNotFoundError,
    choose_partition,
    find_layers,
)
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.split import find_split
from tests.helpers.block_parity import largest_difference


class Vision(nn.Module):
    """A vision transformer as tutorials have it."""

    def __init__(self, blocks: type[nn.Sequential | nn.ModuleList] = nn.ModuleList) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = [nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(5)]
        self.blocks = nn.Sequential(*made) if blocks is nn.Sequential else nn.ModuleList(made)
        self.patches = nn.Linear(3, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.places = nn.Parameter(torch.randn(1, 7, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        return hidden + self.places[:, : hidden.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0] * self.scale)


class Called(Vision):
    def __init__(self) -> None:
        super().__init__(nn.Sequential)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patches(x) + self.places[:, : x.shape[1]]
        token = self.token.expand(len(x), -1, -1)
        hidden = self.norm(self.blocks(torch.cat([token, hidden], dim=1))[:, 0])
        return self.head(hidden * self.scale)


class Early(Called):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        return self.head(self.norm(self.blocks(self.embed(x)))[:, 0] * scale)


class User(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    images, wanted = batch
    return F.cross_entropy(model(images), wanted)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(3, 4, 6, 3, generator=generator, dtype=torch.float64)
    return [(each, torch.randint(3, (4,), generator=generator)) for each in images]


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
        assert split.foreign_names() & everywhere == everywhere - names
        run = layers_of(split.layers, split.layers_per_stage, stage)
        assert {n.rpartition("/")[2] for n, _ in run.named_parameters() if "beside" in n} == {
            name.removeprefix("model.") for name in names
        }
        assert not {id(p) for p in split.tensors_outside(user)}
        with split.whole():
            assert user.model.places.shape == (1, 7, 4)
        state = User(model()).state_dict()
        assert user.load_state_dict(state) == ([], [])
        again = find_split(user, PipelineConfig("1f1b", layers="auto"), 2, stage)
        again.cut()
        assert again.foreign_names() == split.foreign_names()
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


class Features(Called):
    """Runs the blocks in a method, as many do."""

    def features(self, x: Tensor) -> Tensor:
        scale = self.scale.exp()
        return self.norm(self.blocks(self.embed(x))[:, 0]) * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Returned(Features):
    def features(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return hidden + self.blocks(hidden)


def test_a_method_may_run_the_blocks() -> None:
    assert is_ahead(Features(), "token", "blocks")
    assert not is_ahead(Features(), "scale", "blocks")
    _, layers = find_layers(User(Features()), "model.blocks")
    ahead, behind = (placed.names for placed in layers.placed[1:])
    assert (ahead, behind) == ({"model.token", "model.places"}, {"model.scale"})
    config = PipelineConfig("zbv", 2, "model.blocks")
    assert largest_difference(Features(), batches(), loss_of, config) < 1e-13


class Skip(Called):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head(hidden + self.blocks(hidden))[:, 0]


class Twice(Called):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.blocks(self.embed(x))))[:, 0]


class Later(Called):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        out = self.blocks(hidden)
        return self.head(out + hidden)[:, 0]


@pytest.mark.parametrize("model", [Skip, Twice, Later, Returned])
def test_a_sequence_that_is_no_chain_is_not_found(model: type[Vision]) -> None:
    with pytest.raises(ValueError, match="outside of the pipelined module"):
        find_layers(User(model()), "auto", by_forwards=True)


class Own(Vision):
    """A user's module that is the model, with what its steps alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.teacher = nn.Linear(2, 2)


class Around(nn.Module):
    """Calls a part with a part that has the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.outer = User(Called())

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.embed(x)).relu()


def test_the_model_may_be_the_users_module() -> None:
    for names in ({}, {"layers": "blocks"}):
        user = Own()
        config = PipelineConfig("1f1b", **names)  # type: ignore[arg-type]
        split = find_split(user, config, 2, 0, by_forwards=True)
        assert (split.path, len(split.layers)) == ("", 5)
        beside = {"temperature", "teacher.weight", "teacher.bias"}
        assert split.layers.of_loss.names == beside
        assert split.is_beside("teacher")
        assert not split.is_beside("blocks.0")
        split.cut()
        assert split.foreign_names() >= {*beside, "scale", "norm.weight", "blocks.4.linear1.weight"}
        assert {"token", "places"} < {name for name, _ in user.named_parameters()}
        again = find_split(user, config, 2, 0, by_forwards=True)
        assert again.layers.of_loss.names == beside
        again.cut()


def test_without_a_look_at_steps_a_model_in_the_users_module_is_preferred() -> None:
    with pytest.raises(LayersNotFoundError):
        find_layers(Own(), "auto")
    user = User(Own())
    assert find_layers(user, "auto", by_forwards=True)[0] == "model"


def test_the_users_module_may_train_ahead_of_the_model() -> None:
    user = Around()
    assert find_layers(user, "auto", by_forwards=True)[0] == ""
    path, layers = find_layers(user, "outer.model.blocks")
    assert (path, len(layers)) == ("", 5)
    assert layers.names[0][:-1] == ("embed", "outer.model.patches")


class Stages(Called):
    """Calls two sequences of blocks, as a ResNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(self.first(x)))
        return self.head(hidden[:, 0] * self.scale)


def test_of_several_sequences_the_largest_is_cut_where_no_trace_may_cut_all() -> None:
    with pytest.raises(LayersNotFoundError):
        find_layers(User(Stages()), "auto")
    path, layers = find_layers(User(Stages()), "auto", by_forwards=True)
    assert (path, len(layers)) == ("model", 5)
    assert "first" in layers.names[0]
    config = PipelineConfig("1f1b", 2, "model.blocks")
    assert largest_difference(Stages(), batches(), loss_of, config) < 1e-13


def test_of_fewer_blocks_than_stages_a_trace_may_make_more_layers() -> None:
    with pytest.raises(LayersNotFoundError, match="num_stages=6 is more than the 5 layers"):
        find_split(User(Called()), PipelineConfig("1f1b"), 6, 0)
    with pytest.raises(ValueError, match="num_stages=6 is more than the 5 layers") as raised:
        find_split(User(Called()), PipelineConfig("1f1b", layers="model.blocks"), 6, 0)
    assert not isinstance(raised.value, LayersNotFoundError)


def test_a_named_sequence_whose_holder_only_stores_it_is_cut_alone() -> None:
    user = User(nn.ModuleDict({"net": Called().blocks, "head": nn.Linear(2, 2)}))
    path, layers = find_layers(user, "model.net")
    assert path == "model.net"
    assert layers.of_loss.names == {"model.head.weight", "model.head.bias"}


def test_hooks_of_a_sequence_run() -> None:
    model, seen = Called(), []
    model.blocks.register_forward_hook(lambda _, __, out: seen.append(out.isnan().any().item()))
    config = PipelineConfig("1f1b", 2, "model.blocks")
    assert largest_difference(model, batches(), loss_of, config) < 1e-13
    assert seen
    assert not any(seen)

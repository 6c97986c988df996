"""Sequences of blocks that a forward calls."""

from __future__ import annotations

import copy

import pytest
from torch import Tensor, nn

from lightning_dist.engine.splitting.blocks.block_loop import is_ahead
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.find_layers import (
    LayersNotFoundError,
    find_layers,
)
from lightning_dist.engine.splitting.split import find_split
from tests.helpers.block_parity import largest_difference
from tests.helpers.networks.vision import Called, User, Vision, batches, loss_of


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


class Small(nn.Linear):
    """A block of another kind."""


class Stages(Called):
    """Calls two sequences of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Small(3, 3), Small(3, 3)).double()

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


class Residuals(Stages):
    """Has blocks of the same class in another sequence, as a ResNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0)).double()

    def embed(self, x: Tensor) -> Tensor:
        return self.first(super().embed(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))[:, 0] * self.scale)


class WithALongHead(Called):
    """Has linear layers behind the blocks, in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def test_blocks_are_of_a_class_of_their_own() -> None:
    with pytest.raises(LayersNotFoundError):
        find_layers(User(Residuals()), "auto", by_forwards=True)
    path, layers = find_layers(User(WithALongHead()), "auto")
    assert (path, layers.origin) == ("model", "the blocks of blocks")
    user = User(Called())
    user.average = copy.deepcopy(user.model).requires_grad_(False)
    assert find_layers(user, "auto")[0] == "model"


class SmallList(Called):
    """Has a small list behind its sequence of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.ModuleList([Small(4, 4), Small(4, 4)]).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(x))[:, 0]
        for block in self.last:
            hidden = block(hidden)
        return self.head(hidden * self.scale)


def test_a_list_is_the_blocks_if_nothing_is_larger() -> None:
    with pytest.raises(LayersNotFoundError):
        find_layers(User(SmallList()), "auto")  # a trace may cut both
    _, layers = find_layers(User(SmallList()), "auto", by_forwards=True)
    assert layers.origin == "the blocks of blocks"


def test_of_fewer_blocks_than_stages_a_trace_may_make_more_layers() -> None:
    with pytest.raises(LayersNotFoundError, match="num_stages=6 is more than the 5 layers"):
        find_split(User(Called()), PipelineConfig("1f1b"), 6, 0)
    with pytest.raises(ValueError, match="num_stages=6 is more than the 5 layers") as raised:
        find_split(User(Called()), PipelineConfig("1f1b", layers="model.blocks"), 6, 0)
    assert not isinstance(raised.value, LayersNotFoundError)


class Repeated(Called):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks[:2], *self.blocks[:2])


def test_a_block_that_is_repeated_counts_each_time_and_is_tied() -> None:
    split = find_split(User(Repeated()), PipelineConfig("1f1b", layers="model.blocks"), 2, 0)
    assert (len(split.layers), split.layers_per_stage) == (4, (2, 2))
    names = {name for tie in split.ties for of_stage in tie.names.values() for name in of_stage}
    assert {"blocks.0.norm1.weight", "blocks.2.norm1.weight"} <= names


class Halved(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x) * 0.5
        return x


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


def test_a_class_of_the_users_keeps_its_forward() -> None:
    config, model = PipelineConfig("1f1b", 2, "model.blocks"), Called()
    model.blocks = Halved(*model.blocks)
    assert largest_difference(model, batches(), loss_of, config) < 1e-13
    model.blocks = Residual(*model.blocks)
    with pytest.raises(ValueError, match=r"Block \d .* is given the arguments \['0'\]"):
        largest_difference(model, batches(), loss_of, config)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_sequence_that_is_compiled_as_a_whole_is_refused() -> None:
    model = Called()
    model.blocks.compile()
    with pytest.raises(ValueError, match=r"^Compile the blocks of 'blocks' one by one"):
        find_layers(User(model), "model.blocks")


def test_a_named_sequence_whose_holder_only_stores_it_is_cut_alone() -> None:
    user = User(nn.ModuleDict({"net": Called().blocks, "head": nn.Linear(2, 2)}))
    path, layers = find_layers(user, "model.net")
    assert path == "model.net"
    assert layers.loss_parameters.names == {"model.head.weight", "model.head.bias"}


def test_hooks_of_a_sequence_run() -> None:
    model, seen = Called(), []
    model.blocks.register_forward_hook(lambda _, __, out: seen.append(out.isnan().any().item()))
    config = PipelineConfig("1f1b", 2, "model.blocks")
    assert largest_difference(model, batches(), loss_of, config) < 1e-13
    assert seen
    assert not any(seen)

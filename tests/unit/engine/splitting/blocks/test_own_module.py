"""A model that is the user's module, and uses of parameters that no source shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import layers_of
from lightning_dist.engine.splitting.find_layers import (
    LayersNotFoundError,
    find_layers,
)
from lightning_dist.engine.splitting.split import find_split
from tests.helpers.block_parity import largest_difference
from tests.helpers.networks.vision import Called, User, Vision, batches, loss_of


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
        assert split.layers.loss_parameters.names == beside
        assert split.is_beside("teacher")
        assert not split.is_beside("blocks.0")
        split.cut()
        assert split.remote_names() >= {*beside, "scale", "norm.weight", "blocks.4.linear1.weight"}
        assert {"token", "places"} < {name for name, _ in user.named_parameters()}
        again = find_split(user, config, 2, 0, by_forwards=True)
        assert again.layers.loss_parameters.names == beside
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


class InDict(nn.Module):
    """Holds its parts in a dict, which has no forward, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.parts = nn.ModuleDict({"embed": nn.Linear(3, 3), "blocks": blocks})
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts.embed(x)
        for block in self.parts.blocks:
            x = block(x)
        return self.head(x)


def test_blocks_may_be_in_a_dict_of_the_model() -> None:
    for module, layers, expected in (
        (InDict(), "parts.blocks", ""),
        (User(InDict()), "model.parts.blocks", "model"),
    ):
        path, found = find_layers(module, layers)
        assert path == expected
        assert len(found) == 3
        assert found.names[0] == ("parts.embed", "parts.blocks.0")
        assert found.names[-1] == ("parts.blocks.2", "head")
    user = nn.Module()
    user.parts = InDict().parts
    with pytest.raises(ValueError, match="Put the model into a module of its own"):
        find_layers(user, "parts.blocks")


class Hidden(Own):
    """Reads its parameters in ways that its source does not show."""

    def embed(self, x: Tensor) -> Tensor:
        return self.patches(x) + getattr(self, "".join(["pla", "ces"]))[:, : x.shape[1]]


class Left(Called):
    """Leaves a value for the step."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        self.penalty = self.places.square().mean()
        return self.head(self.norm(self.blocks(hidden)[:, 0]) * self.scale)


def test_unseen_uses_are_errors() -> None:
    config = PipelineConfig("1f1b", 2, "model.blocks")
    with pytest.raises(ValueError, match=r"^The forward of Left leaves in 'penalty' what"):
        largest_difference(Left(), batches(), loss_of, config)

    split = find_split(Hidden(), PipelineConfig("1f1b", layers="blocks"), 2, 0)
    assert "places" in split.layers.loss_parameters.names
    split.cut()
    split.layers.attach(torch.device("cpu"))
    stage = layers_of(split.layers, split.layers_per_stage, 0)
    images = batches()[0][0]
    given = split.layers.layer_input(True, None, (images,), {})
    with (
        split.layers.in_step(is_last=False),
        split.layers.in_call(images),
        pytest.raises(ValueError, match=r"Block 0 .* is given .*'places'.* on the last stage"),
    ):
        split.layers.run(stage, given)


def test_units_beside_the_users_own_model_stay_whole() -> None:
    user = Own()
    user.teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    split = find_split(user, PipelineConfig("1f1b", layers="blocks"), 2, 0)
    assert split.is_beside("teacher.0")
    assert not any(map(split.is_beside, ("patches", "blocks.1.linear1", "blocks")))

"""Which blocks are found in a user's module, and what is said where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_dist.engine.splitting.blocks.find_blocks import blocks_of
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.find_layers import find_layers
from lightning_dist.engine.splitting.split import find_split
from tests.unit.engine.splitting.blocks.test_blocks import Block, Body, Model


class Pretrained(nn.Module):
    """What a Hugging Face model is known by."""

    pp_plan: Any = {}
    config = SimpleNamespace()


class Causal(Pretrained):
    pp_plan: Any = {
        "head": (["hidden_states"], ["logits"]),
        "body.embed": (["input_ids"], ["inputs_embeds"]),
        "body.blocks": (["hidden_states", "mask"], ["hidden_states"]),
        "body.norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = Body()

    forward = Model.forward


class Unplanned(Causal):
    pp_plan: Any = {}


class TwoTowers(Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.left = Body()
        self.right = Body()


class NoBlocks(Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2)


class Holder(nn.Module):
    def __init__(self, model: nn.Module, **more: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, module in more.items():
            setattr(self, name, module)


GROUPS = (
    ("body.embed", "body.blocks.0"),
    *((f"body.blocks.{i}",) for i in (1, 2, 3)),
    ("body.blocks.4", "body.norm", "head"),
)


@pytest.mark.parametrize("model", [Causal, Unplanned])
def test_the_first_layer_has_what_comes_before_and_the_last_what_comes_behind(
    model: type[nn.Module],
) -> None:
    path, layers = find_layers(Holder(model()), "auto")
    assert path == "model"
    assert [set(group) for group in layers.names] == [set(group) for group in GROUPS]


def test_it_is_found_again_in_what_a_cut_has_left() -> None:
    holder = Holder(Unplanned())
    names = find_layers(holder, "auto")[1].names
    split = find_split(holder, PipelineConfig("1f1b"), 2, 1)
    split.cut()
    assert find_layers(holder, "auto")[1].names == names
    assert find_split(holder, PipelineConfig("1f1b"), 2, 1).own_names == split.own_names


def test_a_split_knows_which_names_are_whose() -> None:
    holder = Holder(Causal(), metric=nn.BatchNorm1d(2, affine=False))
    split = find_split(holder, PipelineConfig("1f1b", partition=[2, 3]), 2, 0)
    assert split.own_names == [["body.embed", "body.blocks.0", "body.blocks.1"]]
    assert split.keeps("model.body.blocks.1.norm.weight")
    assert not split.keeps("model.body.blocks.2")
    assert not split.keeps("model.head.weight")
    assert split.keeps("model.body")
    assert split.keeps("metric.running_mean")
    assert split.is_in_a_layer("model.head")
    assert not split.is_in_a_layer("model.body.blocks")
    split.cut()
    assert split.remote_names() >= {"model.head.bias", "model.body.blocks.4.linear.weight"}
    assert not any(name.startswith("model.body.embed") for name in split.remote_names())


def test_a_partition_counts_blocks_and_their_company() -> None:
    model = Causal()
    model.body.embed = nn.Embedding(100, 4)  # 400 parameters; a block has 28
    split = find_split(Holder(model), PipelineConfig("1f1b"), 2, 0)
    assert split.layers_per_stage == (1, 4)


def test_a_sequence_that_holds_a_model_is_still_a_sequence() -> None:
    holder = Holder(nn.Sequential(Causal(), nn.Linear(3, 3)))
    path, layers = find_layers(holder, "auto")
    assert (path, len(layers)) == ("model", 2)


@pytest.mark.parametrize(
    ("model", "layers", "path"),
    [(Causal(), "auto", "model"), (Model(), "model.body.blocks", "model")],
)
def test_a_head_of_the_steps_is_beside_the_model(model: nn.Module, layers: str, path: str) -> None:
    found, blocks = find_layers(Holder(model, head=nn.Linear(3, 3)), layers)
    assert (found, len(blocks)) == (path, len(GROUPS))
    assert blocks.loss_parameters.names == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (
            Holder(TwoTowers()),
            "auto",
            r"^Pass layers='model.left.blocks' or layers='model.right.blocks': .*several lists",
        ),
        (Holder(NoBlocks()), "auto", r"^Give the model a .*pp_plan.*NoBlocks has no pipeline plan"),
        (
            Holder(Causal(), other=Causal()),
            "auto",
            r"'other.head.weight' is outside of the model 'model'",
        ),
        (Holder(nn.ModuleList([Block(), Block()])), "model", r"^Put .*layers='model' is"),
        (Holder(Model()), "auto", r"^Build .*layers=.*'model.body.blocks'.*No `nn.Sequential`"),
        (Holder(Model()), "model.body", r"layers='model.body' is a Body"),
    ],
)
def test_what_is_not_clear_is_refused(module: nn.Module, layers: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_layers(module, layers)


class Normed(Model):
    """Has statistics and no weights ahead of the blocks, and a mode of its own behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(4, affine=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.statistics(tokens)))


def test_statistics_are_those_of_the_stage_that_computes_them() -> None:
    first, *_, last = blocks_of(Normed(), "body.blocks", "net").names
    assert "statistics" in first
    assert "dropout" not in (*first, *last)

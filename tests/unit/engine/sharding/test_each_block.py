from __future__ import annotations

import pytest
from hypothesis import given, settings
from torch import nn

from lightning_dist.engine.sharding.wrap import (
    EachBlock,
)
from lightning_dist.engine.tensors.module_tree import (
    shardable_modules,
    split_parameters,
)
from recipes.gpt import GPT
from tests.helpers.networks.wrap_models import (
    Block,
    ConvNet,
    Decoder,
    Expert,
    LanguageModel,
    MixtureBlock,
    Pair,
    Residual,
    names,
    shared_modules,
)


def test_each_block_finds_the_blocks_of_the_recipe() -> None:
    assert names(EachBlock(), GPT(depth=3)) == ["model.1", "model.2", "model.3"]


def test_each_block_finds_the_layers_of_a_list() -> None:
    expected = ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert names(EachBlock(), LanguageModel()) == expected


def test_each_block_looks_through_stages_and_takes_a_stage_of_one_block() -> None:
    expected = ["stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage3.0"]
    assert names(EachBlock(), ConvNet()) == expected


def test_each_block_looks_through_a_sequential_of_sequentials() -> None:
    stage = nn.Sequential(Residual(4, False), Residual(4, False))
    downsample = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    net = nn.Sequential(stage, downsample, nn.Sequential(Residual(4, True)))
    assert names(EachBlock(), net) == ["0.0", "0.1", "2.0"]


def test_each_block_takes_sequentials_that_hold_more_than_the_classes_inside() -> None:
    first = nn.Sequential(nn.Conv2d(8, 8, 3), Residual(1, False), Residual(1, True))
    second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
    assert names(EachBlock(), nn.Sequential(first, second)) == ["0", "1"]


def test_each_block_takes_encoder_and_decoder() -> None:
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    expected = [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)]
    assert names(EachBlock(), model) == expected


def test_each_block_never_takes_experts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), MixtureBlock(), MixtureBlock())
    assert names(EachBlock(), model) == ["1", "2"]


def test_each_block_does_not_take_two_towers_for_blocks() -> None:
    assert names(EachBlock(), Pair(Decoder(2), Decoder(2))) == [
        "left.layers.0",
        "left.layers.1",
        "right.layers.0",
        "right.layers.1",
    ]


def test_each_block_counts_a_block_in_a_block_once() -> None:
    outer = nn.Sequential(Block(), Block())
    outer[1].mlp = nn.Sequential(Block(), Block())
    assert names(EachBlock(), outer) == ["0", "1"]


def test_each_block_looks_into_what_stands_alone_but_not_into_blocks() -> None:
    assert names(EachBlock(), nn.Sequential(Decoder(2), Block())) == [
        "0.layers.0",
        "0.layers.1",
        "1",
    ]
    model = Pair(nn.Sequential(MixtureBlock(), MixtureBlock()), Expert())
    assert names(EachBlock(), model) == ["left.0", "left.1"]
    pairs = [[nn.Sequential(nn.Linear(1, 1)) for _ in range(2)] for _ in range(2)]
    model = nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))
    assert names(EachBlock(), model) == ["0", "1"]


def test_each_block_leaves_what_is_not_worth_a_unit_to_the_root() -> None:
    heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 1)) for _ in range(3))
    small = nn.ModuleList(Pair(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    model = nn.ModuleDict({"heads": heads, "small": small, "decoder": Decoder()})
    assert names(EachBlock(), model) == [f"decoder.layers.{i}" for i in range(3)]


def test_each_block_takes_the_layers_of_an_mlp_without_norms() -> None:
    mlp = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8),
        nn.Linear(8, 1),
    )  # fmt: skip
    assert names(EachBlock(), mlp) == ["0", "3", "5"]


def test_each_block_takes_layers_only_where_they_are_side_by_side() -> None:
    assert names(EachBlock(), Block()) == ["mlp.0", "mlp.2"]


def test_each_block_of_parametrized_layers() -> None:
    mlp = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3)))
    assert names(EachBlock(), mlp) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), GPT(depth=1), nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 1))],
    ids=["one layer", "one block", "no layer twice"],
)
def test_each_block_leaves_a_model_that_repeats_nothing_whole(model: nn.Module) -> None:
    assert EachBlock().select(model) == []


def test_each_block_drops_blocks_that_share_a_weight() -> None:
    model = LanguageModel()
    assert isinstance(model.model.layers[1], Block)
    model.model.layers[1].norm.weight = model.model.norm.weight
    assert names(EachBlock(), model) == ["model.layers.0", "model.layers.2"]


@given(shared_modules())
@settings(max_examples=100)
def test_each_block_always_selects_what_can_be_sharded(model: nn.Module) -> None:
    chosen = names(EachBlock(), model)
    assert set(chosen) <= set(shardable_modules(model))
    assert split_parameters(model, chosen) == []
    assert not any(a != b and a.startswith(f"{b}.") for a in chosen for b in chosen)

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.wrap import AnyOf, ByClass, ByName, EachBlock, Unit, With
from lightning_dist.engine.sharding.wrap_summary import describe
from lightning_dist.engine.tensors.module_tree import shardable_modules, without_splits
from recipes.gpt import GPT
from tests.helpers.networks.wrap_models import Block, LanguageModel, Pair, shared_modules


def held(model: nn.Module, units: list[Unit]) -> dict[str, int]:
    return {row.unit.name: row.num_parameters for row in describe(model, units).rows}


@given(shared_modules(), st.data())
@settings(max_examples=100)
def test_each_unit_holds_what_fully_shard_would_take(model: nn.Module, data: st.DataObject) -> None:
    shardable = list(shardable_modules(model))
    drawn = without_splits(model, data.draw(st.lists(st.sampled_from(shardable), unique=True)))
    units = [Unit(name) for name in shardable if name in drawn]
    taken: set[nn.Parameter] = set()
    expected = {}
    for name in (*(unit.name for unit in units), ""):
        own = [p for p in model.get_submodule(name).parameters() if p not in taken]
        expected[name] = sum(p.numel() for p in own)
        taken.update(own)
    assert held(model, units) == expected


@given(shared_modules(), st.data())
@settings(max_examples=100)
def test_each_parameter_belongs_to_one_unit_whatever_the_cut(
    model: nn.Module, data: st.DataObject
) -> None:
    shardable = list(shardable_modules(model))
    units = [Unit(name) for name in data.draw(st.lists(st.sampled_from(shardable), unique=True))]
    summary = describe(model, units)
    assert len(summary.rows) == len(units) + 1
    num_parameters = sum(row.num_parameters for row in summary.rows)
    assert num_parameters == sum(p.numel() for p in model.parameters())
    assert summary.num_bytes == 4 * num_parameters
    whole = describe(model, units, reshard_after_forward=False)
    assert summary.peak_whole_bytes <= whole.peak_whole_bytes == summary.num_bytes


def test_a_tied_parameter_belongs_to_the_unit_around_both_uses() -> None:
    model = nn.Sequential(LanguageModel(2, tied=True), nn.Linear(1, 1, bias=False))
    counts = held(model, [Unit("0.model.embed"), Unit("0.head"), Unit("0.model"), Unit("0")])
    assert counts == {"": 1, "0": 64, "0.model": 292, "0.model.embed": 0, "0.head": 0}


def row_of_linears(*sizes: int) -> tuple[nn.Sequential, list[Unit]]:
    layers = [nn.Linear(size, 1, bias=False) for size in sizes]
    return nn.Sequential(*layers), [Unit(str(index)) for index in range(1, len(sizes))]


def test_two_neighbours_and_the_root_are_whole_at_a_time() -> None:
    model, units = row_of_linears(1, 10, 2, 20, 3, 10)
    assert describe(model, units).peak_whole_bytes == 4 * (1 + 20 + 3 + 10 - 10)
    model, units = row_of_linears(1, 10, 2, 20, 30, 10)
    assert describe(model, units).peak_whole_bytes == 4 * (1 + 20 + 30)
    model, units = row_of_linears(1, 10)
    assert describe(model, units).peak_whole_bytes == 4 * (1 + 10)
    assert describe(model, []).peak_whole_bytes == 4 * (1 + 10)


def test_units_that_are_not_resharded_stay_whole() -> None:
    model, units = row_of_linears(1, 10, 2, 20, 30, 10)
    units[0] = Unit("1", reshard_after_forward=False)
    assert describe(model, units).peak_whole_bytes == 4 * (1 + 10 + 20 + 30)
    units[0] = Unit("1", reshard_after_forward=2)
    assert describe(model, units).peak_whole_bytes == 4 * (1 + 5 + 20 + 30)
    everything = describe(model, units, reshard_after_forward=False)
    assert everything.peak_whole_bytes == 4 * (1 + 10 + 2 + 20 + 30 + 10)
    halves = describe(model, units, reshard_after_forward=2)
    assert halves.peak_whole_bytes == 4 * (1 + 5 + 1 + 20 + 30 + 5)


def test_a_unit_around_others_is_whole_while_they_run() -> None:
    inner = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (10, 20))
    model = nn.Sequential(Pair(*inner), Pair(*(nn.Linear(30, 1, bias=False) for _ in range(2))))
    blocks = [Unit("0"), Unit("1")]
    assert describe(model, blocks).peak_whole_bytes == 4 * (2 + 30 + 2 + 60)
    parts = [Unit(f"{block}.{side}") for block in (0, 1) for side in ("left", "right")]
    # Forward: 1.left, 1.right in 1. Backward: 1.left in 1, and 0, which comes next.
    assert describe(model, [*parts, *blocks]).peak_whole_bytes == 4 * (2 + 30 + 30)
    model[1].left, model[1].right = nn.Linear(30, 1, bias=False), nn.Identity()
    model[0].right = nn.Identity()
    own = [Unit("1.left"), *blocks]
    assert describe(model, own).peak_whole_bytes == 4 * (2 + 30 + 2 + 10)
    model = nn.Sequential(
        Pair(nn.Linear(1, 1, bias=False), nn.Linear(50, 1, bias=False)),
        Pair(*(nn.Linear(1, 1, bias=False) for _ in range(2))),
    )
    # Forward: 0.right in 0, and 1, which comes next.
    assert describe(model, [*parts, *blocks]).peak_whole_bytes == 4 * (2 + 50 + 2)


def test_bytes_follow_the_precision() -> None:
    model = LanguageModel(2)
    units = AnyOf([EachBlock(), With(ByClass(["RMSNorm"]), keep_fp32=True)]).select(model)
    sizes = {
        row.unit.name: row.num_bytes for row in describe(model, units, bytes_per_element=2).rows
    }
    assert sizes["model.layers.0"] == 2 * 140
    assert sizes["model.layers.0.norm"] == 4 * 4
    assert describe(model.double(), units).num_bytes == 8 * 420


def test_meta_parameters_count() -> None:
    with torch.device("meta"):
        model = LanguageModel(2)
    assert describe(model, []).num_bytes == 4 * 420


def test_text_folds_equal_units() -> None:
    model = GPT(depth=12)
    units = AnyOf([EachBlock(), With(ByName(["model.13"]), False)]).select(model)
    assert str(describe(model, units, bytes_per_element=2)).splitlines() == [
        "unit                  class      parameters    whole",
        "(root)                GPT            16.4 K  32.8 kB",
        "model.1 ... model.12  Block x12      49.3 K  98.6 kB  each",
        "model.13              Head           16.4 K  32.9 kB  reshard_after_forward=False",
        "all                                   624 K  1.25 MB  263 kB at a time",
    ]


def test_text_folds_no_units_that_are_treated_differently() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    policy = AnyOf([EachBlock(), With(ByName(["1"]), keep_fp32=True)])
    lines = str(describe(model, policy.select(model))).splitlines()
    assert [line.split("  ")[0] for line in lines[2:-1]] == ["0 ... 2", "1"]


def test_text_shows_the_users_class_after_sharding() -> None:
    model = nn.Sequential(Block(), Block())
    for block in model:  # as fully_shard does
        block.__class__ = type("FSDPBlock", (FSDPModule, Block), {})
    assert "0 ... 1  Block x2" in str(describe(model, EachBlock().select(model)))


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1"), (999, "999"), (1000, "1 K"), (999_499, "999 K"), (999_500, "1 M")],
)
def test_text_has_three_digits(size: int, text: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(size, 1, bias=False)
    assert f"Linear  {text:>10}  " in str(describe(model, []))

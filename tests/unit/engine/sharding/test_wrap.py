from __future__ import annotations

import dataclasses
from pathlib import Path

import jsonargparse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy
from typing_extensions import override

from lightning_dist.engine.sharding.wrap import (
    AnyOf,
    ByClass,
    ByName,
    BySize,
    EachBlock,
    Manual,
    Unit,
    With,
    WrapPolicy,
    parse_policy,
)
from lightning_dist.engine.tensors.module_tree import (
    shardable_modules,
    split_parameters,
    without_splits,
)
from tests.helpers.networks.wrap_models import (
    Block,
    LanguageModel,
    WideBlock,
    modules,
    names,
    shared_modules,
)

# --- ByClass, ByName, BySize ---------------------------------------------------------------------


def test_by_class_takes_subclasses_and_import_paths() -> None:
    model = nn.Sequential(Block(), WideBlock(), nn.Linear(2, 2))
    assert names(ByClass(["Block"]), model) == ["0", "1"]
    assert names(ByClass(["WideBlock"]), model) == ["1"]
    assert names(ByClass(["tests.helpers.networks.wrap_models.Block"]), model) == ["0", "1"]
    linears = ["0.attention.qkv", "0.attention.out", "0.mlp.0", "0.mlp.2"]
    expected = [*linears, *(name.replace("0.", "1.", 1) for name in linears), "2"]
    assert names(ByClass(["torch.nn.Linear"]), model) == expected
    assert names(ByClass(["torch.nn.modules.linear.Linear"]), model) == expected
    with pytest.raises(ValueError, match="'elsewhere.Block'"):
        ByClass(["elsewhere.Block"]).select(model)


def test_by_class_takes_inner_modules_first() -> None:
    chosen = names(ByClass(["Decoder", "Block", "Attention"]), LanguageModel(2))
    assert chosen == [
        "model.layers.0.attention",
        "model.layers.0",
        "model.layers.1.attention",
        "model.layers.1",
        "model",
    ]


def test_by_class_knows_a_sharded_class() -> None:
    model = nn.Sequential(Block(), Block())
    for block in model:  # as fully_shard does
        block.__class__ = type("FSDPBlock", (FSDPModule, Block), {})
    assert names(ByClass(["Block"]), model) == ["0", "1"]
    assert names(EachBlock(), model) == ["0", "1"]
    with pytest.raises(ValueError, match=r"Did you mean 'Block'.* Sequential x2, Block x2\.$"):
        ByClass(["FSDPBlock"]).select(model)


def test_by_class_lists_what_there_is() -> None:
    message = (
        r"The class 'Blok' fits no module .*Did you mean 'Block'\? There are: Linear x13,"
        r" RMSNorm x4, Attention x3, Sequential x3, Block x3, Embedding x1, Decoder x1\.$"
    )
    with pytest.raises(ValueError, match=message):
        ByClass(["Linear", "Blok"]).select(LanguageModel())


@pytest.mark.parametrize("name", ["ReLU", "ModuleList", "LanguageModel", "Parameter"])
def test_by_class_refuses_what_cannot_be_a_unit(name: str) -> None:
    with pytest.raises(ValueError, match=f"The class '{name}' fits no module that can be a unit"):
        ByClass([name]).select(LanguageModel())


def test_by_name_fits_part_by_part() -> None:
    model = LanguageModel(2)
    assert names(ByName(["model.layers.*"]), model) == ["model.layers.0", "model.layers.1"]
    assert names(ByName(["*.*.1.att*", "head"]), model) == ["model.layers.1.attention", "head"]
    assert names(ByName(["model.layers.[!0]"]), model) == ["model.layers.1"]


def test_by_name_lists_names() -> None:
    message = (
        r"The pattern 'model.layer.\*' .*Did you mean 'model.layers.\*' .*There are: model,"
        r" model.embed, model.layers.\*, model.layers.\*.norm, .*, model.layers.\*.mlp.\*,"
        r" model.norm, head\.$"
    )
    with pytest.raises(ValueError, match=message):
        ByName(["head", "model.layer.*"]).select(LanguageModel())


def test_long_lists_are_shortened() -> None:
    model = nn.ModuleDict({f"part{i}x": nn.Linear(1, 1) for i in range(20)})
    with pytest.raises(ValueError, match=r"part11x and 8 more\.$"):
        ByName(["nothing"]).select(model)


def test_by_size_counts_parameters_of_units_inside_once() -> None:
    model = LanguageModel(2)  # a block has 4 + 64 + 76 parameters, the embedding and the head 64
    assert names(BySize(70), model) == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
        "model",
    ]
    assert names(BySize(140), model) == ["model.layers.0", "model.layers.1"]
    with pytest.raises(ValueError, match=r"min_parameters=1,000. The largest are: model 356, mod"):
        BySize(1000).select(model)
    with pytest.raises(ValueError, match="min_parameters=0"):
        BySize(0)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@given(modules, st.integers(1, 40))
@settings(max_examples=100)
def test_by_size_is_the_policy_of_torch(part: nn.Module, min_parameters: int) -> None:
    root = nn.Sequential(part, nn.Linear(40, 1, bias=False))
    own = {id(root.get_submodule(name)) for name in names(BySize(min_parameters), root)}

    def decide(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_parameters)

    _recursive_wrap(root, decide, Wrapper, set(), set(), only_wrap_children=True)
    assert {id(w.module) for w in root.modules() if isinstance(w, Wrapper)} == own


# --- what holds for all of them ------------------------------------------------------------------


@given(modules)
@settings(max_examples=100)
def test_inner_modules_come_first(part: nn.Module) -> None:
    root = nn.Sequential(part, nn.Linear(1, 1))
    order = names(ByClass(["Module"]), root)
    seen: set[nn.Module] = set()
    for name in order:
        unit = root.get_submodule(name)
        assert not isinstance(unit, nn.ModuleList)
        inside = {m for m in unit.modules() if m is not unit and not isinstance(m, nn.ModuleList)}
        assert inside <= seen
        seen.add(unit)
    lists = {m for m in root.modules() if isinstance(m, nn.ModuleList)}
    assert seen == set(root.modules()) - lists - {root}


def test_a_shared_module_is_one_unit_under_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Linear(2, 2), shared)
    assert names(ByName(["2", "1"]), model) == ["0.0", "1"]
    assert names(AnyOf([ByName(["2"]), ByName(["0.0"])]), model) == ["0.0"]


def test_nothing_inside_of_multihead_attention_is_a_unit() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert names(ByClass(["Linear", "MultiheadAttention"]), layer) == [
        "self_attn",
        "linear1",
        "linear2",
    ]
    assert names(BySize(80), layer) == ["self_attn"]


def test_a_module_without_a_forward_is_no_unit() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    space = nn.Module()
    space.linear = nn.Linear(1, 1)
    model.append(space)
    assert names(ByClass(["Module"]), model) == ["0", "1.linear"]


def test_a_tied_weight_must_not_be_cut() -> None:
    model = LanguageModel(tied=True)
    assert names(EachBlock(), model) == [f"model.layers.{i}" for i in range(3)]
    message = (
        r"^ByName\(patterns=\['head'\]\) puts the uses of one shared parameter into several units:"
        r" 'model.embed.weight' in the root, 'head.weight' in head\..*none of \['head'\]; it then"
        r" belongs to the root\.$"
    )
    with pytest.raises(ValueError, match=message):
        ByName(["head"]).select(model)
    assert names(BySize(64), model) == [
        *(f"model.layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp"))
    ]


def test_a_module_shared_by_two_units_must_not_be_cut() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({name: nn.Sequential(shared, nn.Linear(2, 2)) for name in "abc"})
    with pytest.raises(ValueError, match=r"'a.0.weight' in a, 'b.0.weight' in b, 'c.0.weight' in "):
        ByName(["a", "b"]).select(model)
    assert names(ByName(["a", "b", "a.0"]), model) == ["a.0", "a", "b"]


@given(shared_modules(), st.data())
@settings(max_examples=100)
def test_dropping_units_mends_all_splits(model: nn.Module, data: st.DataObject) -> None:
    units = data.draw(st.lists(st.sampled_from(list(shardable_modules(model))), unique=True))
    kept = without_splits(model, units)
    assert split_parameters(model, kept) == []
    if not split_parameters(model, units):
        assert kept == units


def test_a_policy_of_the_users_own() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(WrapPolicy):
        name: str

        @override
        def choose(self, module: nn.Module) -> list[Unit]:
            return [Unit(self.name), Unit("0", keep_fp32=True)]

    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert Own("0").select(model) == [Unit("0", keep_fp32=True)]
    with pytest.raises(ValueError, match=r"Own\(name='1'\) has chosen '1', which is no module"):
        Own("1").select(model)


# --- combinations --------------------------------------------------------------------------------


def test_with_treats_modules_differently_and_any_of_joins() -> None:
    model = LanguageModel(2)
    policy = AnyOf(
        [
            EachBlock(),
            With(ByName(["model.layers.1"]), reshard_after_forward=False),
            With(ByName(["model.layers.*"]), reshard_after_forward=2),
            With(ByClass(["RMSNorm"]), keep_fp32=True),
        ]
    )
    assert policy.select(model) == [
        Unit("model.layers.0.norm", keep_fp32=True),
        Unit("model.layers.0", reshard_after_forward=2),
        Unit("model.layers.1.norm", keep_fp32=True),
        Unit("model.layers.1", reshard_after_forward=False),
        Unit("model.norm", keep_fp32=True),
    ]


def test_the_outer_with_counts() -> None:
    inner = With(ByName(["0"]), reshard_after_forward=False)
    model = nn.Sequential(nn.Linear(1, 1))
    assert With(inner, keep_fp32=True).select(model) == [Unit("0", False, True)]
    assert With(inner, reshard_after_forward=True).select(model) == [Unit("0", True, False)]


def test_options_and_lists_are_checked() -> None:
    for ranks in (0, 1, -2):
        with pytest.raises(ValueError, match=f"reshard_after_forward={ranks} must be"):
            With(EachBlock(), reshard_after_forward=ranks)
    with pytest.raises(ValueError, match="names='Block' must be a list"):
        ByClass("Block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patterns=\[\] must be a list with"):
        ByName([])
    with pytest.raises(ValueError, match=r"policies=\[\] must be"):
        AnyOf([])
    with pytest.raises(ValueError, match=r"Manual\(\) .*cannot be combined"):
        AnyOf([EachBlock(), Manual()])
    with pytest.raises(ValueError, match="'Block' is no wrap policy"):
        AnyOf(EachBlock(), "Block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Manual\(\) .*cannot be combined"):
        With(Manual())


def test_manual_selects_nothing_and_says_so() -> None:
    assert Manual().select(LanguageModel()) == []
    assert Manual().is_manual
    assert not EachBlock().is_manual


# --- as text -------------------------------------------------------------------------------------


def test_parse() -> None:
    policy = ByClass(["Block"])
    assert parse_policy(policy) is policy
    assert parse_policy("auto") == EachBlock()
    assert parse_policy("manual") == Manual()
    assert parse_policy("EachBlock") == parse_policy("lightning_dist.wrap.EachBlock") == EachBlock()
    assert parse_policy("lightning_dist.wrap.Manual") == Manual()
    with pytest.raises(ValueError, match=r"wrap='lightning_dist.wrap.ByClass' .* needs its arg"):
        parse_policy("lightning_dist.wrap.ByClass")
    with pytest.raises(ValueError, match=r"wrap='aut' is unknown. Did you mean 'auto'\?"):
        parse_policy("aut")
    with pytest.raises(ValueError, match=r"Did you mean 'ByClass'\? Use 'auto', 'manual' or"):
        parse_policy("by_class")
    with pytest.raises(ValueError, match="wrap=None is unknown"):
        parse_policy(None)  # type: ignore[arg-type]


def test_a_policy_prints_as_it_is_typed() -> None:
    policy = AnyOf([EachBlock(), With(BySize(3), False, True), ByName(["a.*"]), ByClass(["B"])])
    assert eval(repr(policy)) == policy
    assert AnyOf(*policy.policies) == policy


class Strategy:
    def __init__(self, wrap: str | WrapPolicy = "auto") -> None:
        self.wrap = wrap


def test_yaml_reaches_every_dial(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("""
strategy:
  wrap:
    class_path: lightning_dist.wrap.AnyOf
    init_args:
      policies:
      - class_path: lightning_dist.wrap.EachBlock
      - class_path: lightning_dist.wrap.With
        init_args:
          policy: {class_path: lightning_dist.wrap.ByClass, init_args: {names: [RMSNorm]}}
          reshard_after_forward: false
          keep_fp32: true
      - class_path: lightning_dist.wrap.With
        init_args:
          policy: {class_path: lightning_dist.wrap.BySize, init_args: {min_parameters: 7}}
          reshard_after_forward: 2
""")
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Strategy, "strategy")
    parsed = parser.instantiate(parser.parse_args([f"--config={config}"]))
    norms = With(ByClass(["RMSNorm"]), reshard_after_forward=False, keep_fp32=True)
    expected = AnyOf([EachBlock(), norms, With(BySize(7), reshard_after_forward=2)])
    assert parsed.strategy.wrap == expected
    assert parser.instantiate(parser.parse_args(["--strategy.wrap=auto"])).strategy.wrap == "auto"

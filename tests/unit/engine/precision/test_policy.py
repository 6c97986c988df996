from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.engine.precision.policy import HalfPrecision

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.linear = nn.Linear(4, 4)


class NormalisingModel(nn.Module):
    """Has "norm" in its name, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.pre_norm_linear = nn.Linear(4, 4)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = NormalisingModel()
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.BatchNorm1d(4)})
        self.loss = nn.CrossEntropyLoss()
        self.temperature = nn.Parameter(torch.ones(1))
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def test_norms_and_the_loss_are_kept() -> None:
    root = Root()
    half = HalfPrecision(BF16)
    norms = {f"model.blocks.{i}.norm1" for i in range(2)}
    assert half.kept(root).keys() == {*norms, "model.pre_norm_linear", "heads.b", "loss"}
    inside = ["attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight"]
    inside += ["attention.out_proj.bias", "linear.weight", "linear.bias"]
    blocks = {f"model.blocks.{i}.{name}" for i in range(2) for name in inside}
    assert half.half_parameters(root).keys() == blocks | {"heads.a.weight", "heads.a.bias"}
    assert [name for name, _ in half.entries(root)] == ["model", "heads.a"]
    assert half.keeps_loss
    assert half.is_loss("loss", root.loss)
    assert not half.is_loss("heads.b", root.heads["b"])


def test_what_is_kept_is_kept_whole() -> None:
    half = HalfPrecision(BF16, ("multiheadATTENTION",))
    kept = half.kept(Root())
    assert kept.keys() == {f"model.blocks.{i}.attention" for i in range(2)}
    names = half.half_parameters(Root())
    assert "model.blocks.0.norm1.weight" in names
    assert not any("attention" in name for name in names)
    assert not half.keeps_loss


def test_what_a_module_is_called_with() -> None:
    half, root = HalfPrecision(BF16), Root()
    half_paths = ["model", "model.blocks.0", "model.blocks.1.linear", "heads.a"]
    assert {half.dtype_into(root, path) for path in half_paths} == {BF16}
    assert half.dtype_into(root, "model.blocks.0.norm1") == torch.float32
    assert half.dtype_into(root, "heads.b") == torch.float32


def test_parameters_themselves_become_half() -> None:
    root = Root()
    half = HalfPrecision(BF16, master_weights=False)
    for _ in range(2):  # and stay so
        half.convert(root)
        assert root.model.blocks[0].linear.weight.dtype == BF16
        assert root.model.blocks[0].norm1.weight.dtype == torch.float32
        assert root.temperature.dtype == torch.float32


def test_masters_are_fp32() -> None:
    root = Root()
    root.heads["a"].bias.data = root.heads["a"].bias.data.double()
    with pytest.raises(ValueError, match=r"'heads.a.bias' is torch.float64.*`.float\(\)`"):
        HalfPrecision(BF16).half_parameters(root)
    root = Root()
    HalfPrecision(BF16, master_weights=False).convert(root)
    with pytest.raises(ValueError, match="is torch.bfloat16"):
        HalfPrecision(BF16).half_parameters(root)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # since torch 2.14 a FutureWarning
def test_scripted_modules_take_no_hooks() -> None:
    root = Root()
    root.model.blocks[1].linear = torch.jit.script(root.model.blocks[1].linear)
    with pytest.raises(ValueError, match=r"scripted module: model.blocks.1.linear\."):
        HalfPrecision(BF16).convert(root)

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.rebalance.relocation import Exchanged, values_of
from lightning_dist.engine.tensors.skeleton import skeleton_of

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Has all kinds of things that a layer may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.arange(3.0), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def make() -> tuple[nn.ModuleDict, nn.ModuleDict]:
    """Gives modules in use, and their structure as it was when the model was cut."""
    modules = nn.ModuleDict({"0": Counting()})
    structure = skeleton_of(modules)
    layer = modules["0"]
    layer.calls = 7
    layer.seen += 5.0
    layer.norm.eval()
    layer.norm.bias.requires_grad_(False)
    layer.register_buffer("late", torch.full((2,), 3.0))
    layer.norm.weight.grad = torch.full((3,), 2.0)
    return modules, structure


@pytest.mark.parametrize("with_gradients", [True, False])
def test_all_that_a_layer_holds_comes_along(with_gradients: bool) -> None:
    modules, structure = make()
    values = values_of(modules, with_gradients=with_gradients)
    Exchanged(CPU).fill(structure, values)
    assert structure["0"].calls == 7
    assert structure["0"].norm.training is False
    assert structure["0"].training is True
    pairs = zip(modules.named_parameters(), structure.named_parameters(), strict=True)
    for (name, there), (same_name, here) in pairs:
        assert name == same_name
        assert torch.equal(there, here)
        assert there.requires_grad == here.requires_grad
        assert there.data_ptr() != here.data_ptr()
        assert there.stride() == here.stride()
    assert dict(structure.named_buffers()).keys() == dict(modules.named_buffers()).keys()
    for name, buffer in modules.named_buffers():
        assert torch.equal(structure.get_buffer(name), buffer)
    gradient = structure["0"].norm.weight.grad
    assert torch.equal(gradient, torch.full((3,), 2.0)) if with_gradients else gradient is None


def test_a_layer_that_left_holds_nothing_but_its_structure() -> None:
    modules, _ = make()
    called: list[int] = []
    modules["0"].register_forward_hook(lambda *_: called.append(1))
    held = [weakref.ref(t) for t in (*modules.parameters(), *modules.buffers())]
    whole = modules["0"]
    Exchanged(CPU).strip(modules)
    assert all(reference() is None for reference in held)
    assert modules["0"] is whole
    assert len(whole._forward_hooks) == 1
    assert {t.device.type for t in (*modules.parameters(), *modules.buffers())} == {"meta"}
    assert not modules["0"].norm.bias.requires_grad


def test_what_is_one_tensor_stays_one() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    layers[1].weight = layers[0].weight
    values = [values_of(layer, with_gradients=False) for layer in layers]
    stripped, filled = Exchanged(CPU), Exchanged(CPU)
    for layer in layers:
        stripped.strip(layer)
    assert layers[0].weight is layers[1].weight
    for layer, own in zip(layers, values, strict=True):
        filled.fill(layer, own)
    assert layers[0].weight is layers[1].weight
    assert isinstance(layers[0].weight, nn.Parameter)
    assert torch.equal(layers[0].weight, values[0].parameters["weight"])


def test_a_buffer_may_have_grown() -> None:
    modules = nn.BatchNorm1d(3)
    structure = skeleton_of(modules)
    modules.running_mean = torch.arange(5.0)
    Exchanged(CPU).fill(structure, values_of(modules, with_gradients=False))
    grown: Tensor | None = structure.running_mean
    assert torch.equal(grown, torch.arange(5.0)) if grown is not None else False

from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_dist.engine.checkpoint.optimizer_state import (
    keep_own_parameters,
    load_by_name,
    name_groups,
    state_by_name,
    to_names,
    to_numbers,
)
from lightning_dist.engine.splitting.cut import cut, is_cut, layers_of, whole
from lightning_dist.engine.splitting.layers import LayerSequence
from lightning_dist.engine.splitting.remote_layer import RemoteLayer
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.tensors.skeleton import skeleton_of


def sequence() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def test_names_stay_and_remote_layers_hold_nothing() -> None:
    net = sequence()
    names = {name for name, _ in net.named_parameters()}
    split = PipelineSplit("net", LayerSequence(net), (1, 3), (1,), rank_of_stage=(0, 1), ties=())
    assert split.remote_names() == {"net.0.weight", "net.0.bias"}
    split.cut()
    assert {name for name, _ in net.named_parameters()} == {n for n in names if n[0] != "0"}
    assert split.remote_names() == {"net.0.weight", "net.0.bias"}
    with pytest.raises(ValueError, match="Layer '0' lives on stage 0"):
        net(torch.ones(1, 2))


def test_a_whole_state_can_be_loaded_and_names_are_checked() -> None:
    net, state = sequence(), sequence().state_dict()
    cut(net, [2, 2], [1])
    assert net.load_state_dict(state) == ([], [])
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    for other in (copy.deepcopy(net), nn.Sequential(OrderedDict(net=net))):
        prefix = "net." if other[0] is net else ""
        doubled = {prefix + name: 2 * value for name, value in state.items()}
        other.load_state_dict(doubled)
        assert all(torch.equal(value, doubled[n]) for n, value in other.state_dict().items())
        with pytest.raises(RuntimeError, match="Unexpected key.*9.weight"):
            other.load_state_dict({**doubled, "9.weight": torch.ones(2)})
        del doubled[f"{prefix}3.bias"]
        with pytest.raises(RuntimeError, match="Missing key.*3.bias"):
            other.load_state_dict(doubled)


def test_a_remote_layer_lists_the_shared_parameters_of_which_there_is_a_copy() -> None:
    net = sequence()
    net[3].weight = net[0].weight
    cut(net, [2, 2], [1])
    assert [name for name, _ in net[0].named_parameters()] == ["weight"]
    assert next(net[0].parameters()) is net[3].weight
    assert list(net[1].parameters()) == []
    own = ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert [name for name, _ in net.named_parameters()] == own


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_weight_that_a_hook_computes_can_be_cut() -> None:
    net = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(2, 2)) for _ in range(2)))
    cut(net, [1, 1], [0])
    (layer,) = (part for part in net if isinstance(part, RemoteLayer))
    assert layer.skeleton.weight.is_meta
    assert net[0](torch.ones(1, 2)).requires_grad


def test_cutting_again_alike_does_nothing_and_otherwise_is_refused() -> None:
    net = sequence()
    cut(net, [2, 2], [0])
    layer = net[0]
    cut(net, [2, 2], [0])
    assert net[0] is layer
    with pytest.raises(ValueError, match=r"\[1, 3\].*'1' is here"):
        cut(net, [1, 3], [0])


def test_the_whole_structure_can_be_seen_for_a_while() -> None:
    net = sequence()
    total = sum(p.numel() for p in net.parameters())
    cut(net, [2, 2], [0])
    with whole(net):
        assert sum(p.numel() for p in net.parameters()) == total
        assert {p.device.type for p in net.parameters()} == {"cpu", "meta"}
    with whole(net, torch.device("cpu")):
        assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert is_cut(net)
    assert isinstance(net[3], RemoteLayer)


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": vectors, "lr": 0.1}, {"params": matrices}], lr=0.2)


def test_optimizer_state_by_name_is_the_ordinary_one() -> None:
    torch.manual_seed(0)
    single = sequence()
    nets = [copy.deepcopy(single) for _ in range(2)]
    reference = stepped(single)
    single(torch.ones(1, 2)).sum().backward()
    reference.step()
    expected = reference.state_dict()
    parts = []
    for stage, net in enumerate(nets):
        optimizer = stepped(net)
        names = name_groups(optimizer, net)
        cut(net, [3, 1], [stage])
        keep_own_parameters(optimizer, net)
        for name, p in net.named_parameters():
            p.grad = single.get_parameter(name).grad
        optimizer.step()
        parts.append((optimizer, net, names, state_by_name(optimizer, net, names)))
    merged = {
        "state": {**parts[0][3]["state"], **parts[1][3]["state"]},
        "param_groups": parts[0][3]["param_groups"],
    }
    ordinary = to_numbers(merged)
    assert ordinary["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(ordinary["state"][number][key], value)
    for optimizer, net, names, own in parts:
        load_by_name(optimizer, net, to_names(expected, names))
        again = state_by_name(optimizer, net, names)
        assert again["state"].keys() == own["state"].keys()
    with pytest.raises(ValueError, match=r"\[4, 4\].*\[1\]"):
        to_names(expected, [["x"]])


def test_an_optimizer_of_strange_parameters_is_refused() -> None:
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        name_groups(stranger, sequence())


def test_a_remote_layer_imitates_what_it_computes_in() -> None:
    sequence = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    cut(sequence, (1, 1), [1])
    remote = sequence[0]
    assert isinstance(remote, RemoteLayer)
    tokens = torch.zeros(3, dtype=torch.int64, device="meta")
    assert remote.meta_copy()(tokens).dtype == torch.float32
    remote.compute_dtypes = {"weight": torch.bfloat16}
    assert remote.meta_copy()(tokens).dtype == torch.bfloat16
    assert remote.skeleton.weight.dtype == torch.float32


class Watcher(nn.Module):
    """A module one of whose methods is a hook of its own layer, as a LightningModule's may be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.layers[0].register_forward_hook(self.watch)

    def watch(self, *_: object) -> None: ...


def test_a_skeleton_has_the_hooks_themselves() -> None:
    watcher = Watcher()
    (hook,) = skeleton_of(watcher.layers[0])._forward_hooks.values()
    assert hook.__self__ is watcher


def test_a_graph_module_has_a_skeleton() -> None:
    # Its `_replace_hooks` and the like are lists.
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    skeleton = skeleton_of(traced)
    assert [p.device.type for p in skeleton.parameters()] == ["meta", "meta"]


def test_one_activation_may_stand_at_several_places() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    x = torch.randn(3, 2)
    assert len(LayerSequence(model)) == 4
    assert torch.equal(layers_of(LayerSequence(model), (4,), 0)(x), model(x))
    cut(model, (2, 2), (1,))
    assert [isinstance(layer, RemoteLayer) for layer in model] == [True, True, False, False]


def test_a_layer_that_cannot_be_copied_is_named() -> None:
    net = sequence()
    net[2].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be copied: .*lock.* \(in Linear\).*__deepcopy__"):
        cut(net, [2, 2], [0])

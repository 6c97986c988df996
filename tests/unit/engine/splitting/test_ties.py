from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from lightning_dist.engine.splitting.blocks.blocks import Blocks
from lightning_dist.engine.splitting.cut import cut, whole
from lightning_dist.engine.splitting.layers import layers_in
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.ties import Tie, cut_differently, find_ties, tie_again


def sequence() -> nn.Sequential:
    """Layers 0 and 3 share a weight, layers 1 and 2 a bias, layers 2 and 3 another weight."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    net[3].weight = net[0].weight
    net[2].bias = net[1].bias
    net[3].extra = net[2].weight
    return net


OF_FOUR = [
    Tie({0: ("0.weight",), 3: ("3.weight",)}),
    Tie({1: ("1.bias",), 2: ("2.bias",)}),
    Tie({2: ("2.weight",), 3: ("3.extra",)}),
]


def test_a_tie_is_what_several_stages_use() -> None:
    net = sequence()
    assert sorted(find_ties(net, [1, 1, 1, 1]), key=str) == OF_FOUR
    assert find_ties(net, [4]) == ()
    assert find_ties(net, [1, 3]) == (Tie({0: ("0.weight",), 1: ("3.weight",)}),)
    assert str(OF_FOUR[0]) == "'0.weight' (stage 0) and '3.weight' (stage 3)"


def test_each_rank_finds_the_same_ties_after_the_cut() -> None:
    for stages in ([0], [1], [2, 3], [0, 3]):
        net = sequence()
        before = find_ties(net, [1, 1, 1, 1])
        cut(net, [1, 1, 1, 1], stages)
        assert find_ties(net, [1, 1, 1, 1]) == before
        assert find_ties(copy.deepcopy(net), [1, 1, 1, 1]) == before


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Reads(nn.Module):
    """Uses its embedding in the decoder behind the blocks, and as the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.decoder = nn.Embedding(5, 2), Decoder()
        self.head = nn.Linear(2, 5)
        self.decoder.embed.weight = self.head.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.shared(ids)
        for layer in self.decoder.layers:
            x = layer(x)
        out: Tensor = self.head(x + self.decoder.embed(ids))
        return out


def test_the_first_name_is_that_by_which_a_stage_lists_the_parameter() -> None:
    net = Reads()
    layers = Blocks(net, "decoder.layers", ["shared"], ["head", "decoder.embed"])
    (tie,) = find_ties(layers, [1, 1])
    assert tie.names == {
        0: ("shared.weight",),
        1: ("decoder.embed.weight", "head.weight"),
    }
    for stage in (0, 1):
        listed = layers.stage(stage, stage + 1).named_parameters()
        assert [name for name, p in listed if p is net.shared.weight] == [tie.names[stage][0]]


def test_the_ranks_of_a_tie_are_each_named_once() -> None:
    tie = Tie({1: ("1.weight",), 2: ("2.weight",), 5: ("5.weight",), 6: ("6.weight",)})
    looped = (0, 1, 2, 0, 1, 2, 0, 1)
    assert tie.ranks(looped) == (1, 2, 0)
    assert tie.name_on(2, looped) == "2.weight"
    v_placement = (0, 1, 2, 3, 3, 2, 1, 0)
    assert Tie({0: ("0.weight",), 7: ("7.weight",)}).ranks(v_placement) == (0,)


def test_what_was_tied_is_tied_in_the_whole_structure() -> None:
    net = sequence()
    names = [name for name, _ in net.named_parameters()]
    for device in (None, torch.device("cpu")):
        for stage in range(4):
            part = copy.deepcopy(net)
            cut(part, [1, 1, 1, 1], [stage])
            own = dict(part.named_parameters())
            values = {name: p.detach().clone() for name, p in own.items()}
            with whole(part, device):
                assert [name for name, _ in part.named_parameters()] == names
                assert part[3].weight is part[0].weight
                assert part[2].bias is part[1].bias
                assert part[3].extra is part[2].weight
                shown = dict(part.named_parameters(remove_duplicate=False))
                assert all(shown[name] is p for name, p in own.items())
            assert all(torch.equal(own[name], value) for name, value in values.items())


def test_a_stage_has_its_own_name_of_a_tied_parameter_and_no_other() -> None:
    net = sequence()
    names = set(net.state_dict())
    own = {"3.weight", "3.bias", "3.extra"}
    split = PipelineSplit("net", layers_in(net), (1, 1, 1, 1), (3,), (0, 1, 2, 3), ties=())
    assert split.remote_names() == {f"net.{name}" for name in names - own}
    split.cut()
    assert set(net.state_dict()) == own
    assert split.remote_names() == {f"net.{name}" for name in names - own}


def test_new_parameters_are_tied_to_what_other_stages_share() -> None:
    for stage in range(4):
        net = sequence()
        net[2].extra = net[0].weight  # so that a stage has two names of it, and another one
        ties = find_ties(net, [1, 1, 1, 1])
        assert ties[0].names == {0: ("0.weight",), 2: ("2.extra",), 3: ("3.weight",)}
        cut(net, [1, 1, 1, 1], [stage])
        layer = net[stage]
        for name, old in list(layer.named_parameters()):  # as what shards it does
            setattr(layer, name, nn.Parameter(old.detach().clone()))
        tie_again(layers_in(net), ties)
        assert find_ties(net, [1, 1, 1, 1]) == ties
        own = dict(net.named_parameters())
        with whole(net):
            shown = dict(net.named_parameters(remove_duplicate=False))
        assert all(shown[name] is parameter for name, parameter in own.items())
        assert shown["0.weight"] is shown["2.extra"] is shown["3.weight"]
        assert {p.device.type for p in shown.values()} == {"cpu", "meta"}


def test_ties_that_are_cut_differently_are_named_in_the_users_module() -> None:
    tie = Tie({0: ("embed.weight",), 1: ("head.weight",)})
    for path, name in (("", "head.weight"), ("model", "model.head.weight")):
        assert cut_differently([tie], path, {name: Shard(0)}) == [tie]
        assert not cut_differently([tie], path, {})

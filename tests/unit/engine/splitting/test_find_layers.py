from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import cut
from lightning_dist.engine.splitting.find_layers import (
    LayersNotFoundError,
    find_layers,
    refuse_places_outside,
    refuse_ties,
)
from lightning_dist.engine.splitting.layers import layers_in
from lightning_dist.engine.splitting.ties import Tie


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_layer_has_no_other_place_outside() -> None:
    holder = Holder()
    holder.same = holder.model  # it is cut with the other
    refuse_places_outside(holder, "model", layers_in(holder.model))
    holder.head = holder.model[1]
    with pytest.raises(ValueError, match=r"'model.1.weight' is also 'head.weight'"):
        refuse_places_outside(holder, "model", layers_in(holder.model))


def test_a_layer_of_the_users_module_has_no_other_place_in_it() -> None:
    chain = Chain()
    path, layers = find_layers(chain, "auto", by_forwards=True)
    assert path == ""
    refuse_places_outside(chain, "", layers)
    chain.same = chain.blocks[1]
    _, layers = find_layers(chain, "auto", by_forwards=True)
    with pytest.raises(ValueError, match=r"'blocks.1.weight' is also 'same.weight'"):
        refuse_places_outside(chain, "", layers)


def test_ties_are_refused_with_the_reason() -> None:
    refuse_ties((), "Never.")
    message = r"'0.w' \(stage 0\) and '2.w' \(stage 1\) are tied. Not here. Or put both layers"
    with pytest.raises(ValueError, match=message):
        refuse_ties((Tie({0: ("0.w",), 1: ("2.w",)}),), "Not here.")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Experts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        total = self.embed(x)
        for block in self.blocks:
            total = total + block(x)
        return total


class Gated(Experts):
    """Has a sequence in each expert."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.gate = nn.Sequential(nn.Linear(2, 2))


class With(nn.Module):
    """A LightningModule's attributes."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def sequence(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(2, 2))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "path", "names", "origin"),
    [
        (With(net=sequence(Chain(), Chain())), "net", (("0",), ("1",), ("2",)), ""),
        (With(net=sequence(nn.ReLU()), old=frozen(Chain())), "net", (("0",), ("1",)), ""),
        (
            With(net=Chain(), old=frozen(sequence())),
            "net",
            (("embed", "blocks.0"), ("blocks.1",), ("blocks.2",)),
            "the blocks of blocks",
        ),
    ],
)
def test_auto_takes_the_sequence_before_a_list_of_blocks(
    module: nn.Module, path: str, names: tuple[tuple[str, ...], ...], origin: str
) -> None:
    found, layers = find_layers(module, "auto")
    assert (found, layers.names, layers.origin) == (path, names, origin)
    cut(layers, (1,) * len(layers), (0,))
    found, layers = find_layers(module, "auto")  # of what is left, as a second run does
    assert (found, layers.names, layers.origin) == (path, names, origin)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (With(net=Experts()), r"^Build the model as an `nn.Sequential`.*, one of \['net.blocks'\]"),
        (With(one=Chain(), two=Chain()), r"^Build the model as an `nn.Sequential`"),
        (Chain(), r", or put the model into a module of its own.*`layers='model.blocks'`"),
        (
            With(net=Gated()),
            r"^Name the list of its blocks with `layers=`, one of \['net.blocks'\]",
        ),
        (With(encoder=sequence(), decoder=sequence()), r"^Make one `nn.Sequential` of all layers"),
        (With(net=sequence(), head=nn.Linear(2, 2)), r"^Make 'head.weight' part of 'net'"),
        (With(net=Chain(), head=nn.Linear(9, 9)), r"^Build the model as an `nn.Sequential`"),
    ],
)
def test_what_auto_does_not_find_begins_with_the_change(module: nn.Module, message: str) -> None:
    with pytest.raises(LayersNotFoundError, match=message):
        find_layers(module, "auto")

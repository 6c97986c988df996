from __future__ import annotations

import torch
from torch import nn

from lightning_dist.engine.checkpoint.optimizer_state import (
    load_by_name,
    name_groups,
    state_by_name,
)
from lightning_dist.engine.checkpoint.saved_names import first_names, fold, unfold, with_other_names
from lightning_dist.engine.splitting.cut import cut


def tied() -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    net[2].weight = net[0].weight
    return net


FIRSTS = {"2.weight": "0.weight"}


def test_the_other_names_of_tied_parameters() -> None:
    assert first_names(tied()) == FIRSTS
    assert first_names(nn.Linear(2, 2)) == {}


def test_a_checkpoint_has_one_tensor_and_gives_back_all_names() -> None:
    net = tied()
    state = dict(net.state_dict())
    original = {"state_dict": state, "epoch": 3}
    folded = fold(original, ["state_dict", "other"], FIRSTS)
    assert list(original["state_dict"]) == list(net.state_dict())
    assert set(folded["state_dict"]) == set(state) - {"2.weight"}
    assert with_other_names(folded) == {"0.weight": ["2.weight"]}
    unfold(folded, ["state_dict", "other"])
    assert folded.keys() == original.keys()
    assert folded["state_dict"].keys() == state.keys()
    assert folded["state_dict"]["2.weight"] is folded["state_dict"]["0.weight"]


def test_a_part_writes_its_copy_by_the_first_name() -> None:
    last = fold({"state_dict": {"2.weight": 1, "2.bias": 2}}, ["state_dict"], FIRSTS)
    assert last["state_dict"] == {"0.weight": 1, "2.bias": 2}
    # An average of weights stands under the first of a part's names only.
    for names in (("0.weight", "2.weight"), ("2.weight", "3.weight")):
        both = fold(
            {"state_dict": dict(zip(names, (1, 5), strict=True))},
            ["state_dict"],
            {**FIRSTS, "3.weight": "0.weight"},
        )
        assert both["state_dict"] == {"0.weight": 1}


def test_what_has_no_ties_stays_as_it_is() -> None:
    plain = {"state_dict": {"0.weight": 1}}
    assert fold(plain, ["state_dict"], {}) == plain
    unfold(plain, ["state_dict"])
    assert plain == {"state_dict": {"0.weight": 1}}


def test_a_copy_has_the_optimizer_state_of_the_first_name() -> None:
    net = tied()
    optimizer = torch.optim.AdamW(net.parameters())
    names = name_groups(optimizer, net)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = state_by_name(optimizer, net, names)
    cut(net, [1, 1, 1], [2])
    own = [p for _, p in net.named_parameters()]
    part = torch.optim.AdamW(own)
    load_by_name(part, net, whole, FIRSTS)
    found = state_by_name(part, net, names, FIRSTS)
    assert set(found["state"]) == {"0.weight", "2.bias"}
    for name, entries in found["state"].items():
        assert all(torch.equal(v, whole["state"][name][key]) for key, v in entries.items())

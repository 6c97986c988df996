"""What the last stage has beside the pipelined module: who has it, and who may use it when."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import cut, layers_of
from lightning_dist.engine.splitting.find_layers import choose_partition, find_layers
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.loss_parameters import LossParameters

CPU = torch.device("cpu")


class User(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.head = nn.Linear(2, 2)
        self.tied = self.head
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


NAMES = {"head.weight", "head.bias", "tied.weight", "tied.bias", "scale"}


def cut_on(stage: int) -> tuple[User, Layers, LossParameters]:
    user = User()
    _, layers = find_layers(user, "net")
    cut(layers, (3, 1), (stage,))
    layers.attach(CPU)
    return user, layers, layers.loss_parameters


def test_only_the_last_stage_keeps_them() -> None:
    user, layers, first = cut_on(0)
    assert first.names == first.remote_names == NAMES
    assert not first.parameters()
    assert {n for n, _ in user.named_parameters() if "net" not in n} == {
        "frozen.weight",
        "frozen.bias",
    }
    with first.as_empty(None):
        assert user.head.weight.is_meta
        assert user.tied.weight is user.head.weight
    assert user.scale is None
    assert not any("loss" in n for n, _ in layers_of(layers, (3, 1), 0).named_parameters())

    user, layers, last = cut_on(1)
    assert (last.names, last.remote_names) == (NAMES, set())
    stage = dict(layers_of(layers, (3, 1), 1).named_parameters())
    assert stage["beside/head/weight"] is user.head.weight
    assert stage["beside/scale"] is user.scale
    assert len(stage) == 5  # a tied one once
    assert last.num_elements == 7
    assert last.modules() == {"head": user.head}


def test_a_whole_state_is_loaded_and_a_later_run_finds_the_same() -> None:
    user, layers, first = cut_on(0)
    state = User().state_dict()
    assert user.load_state_dict(state) == ([], [])
    path, again = find_layers(user, "auto")
    assert (path, again.loss_parameters) == ("net", first)
    cut(again, (3, 1), (0,))
    user, _, last = cut_on(1)
    _, again = find_layers(user, "auto")
    assert again.loss_parameters is last
    assert copy.deepcopy(user).head.weight is not user.head.weight


def leave(layers: Layers) -> None:
    """Leaves a step behind the layers, as other stages than the last do."""
    with layers.in_call(torch.ones(1)):
        pass
    raise StopIteration


@pytest.mark.filterwarnings("ignore:Sparse")
def test_steps_of_other_stages_see_nans_that_may_not_reach_the_module() -> None:
    for stage in (0, 1):  # a rank may have the first stage and the last one
        user, layers, loss = cut_on(stage)
        before = user.scale
        with layers.in_step(is_last=False):
            scaled = user.head(torch.ones(1, 2)) * user.scale.exp()
            with pytest.raises(ValueError, match=r"scale.* ahead of the pipelined module"):
                layers.in_call((scaled, {})).__enter__()
            user.scale.data.clamp_(-1.0, 1.0)  # as steps do with their own
            sparse = torch.eye(2).to_sparse_csr()
            with layers.in_call((torch.ones(1), sparse)):
                pass
        assert loss._checked == {True}
        loss.attach(CPU)
        with pytest.raises(StopIteration), layers.in_step(is_last=False):
            leave(layers)
        assert scaled.isnan().all()
        assert user.scale is before
        with layers.in_step(is_last=False):  # this mode has been looked at
            assert loss._watch is None
            assert user.scale.isnan()
        with (
            torch.no_grad(),
            layers.in_step(is_last=False),
            pytest.raises(ValueError, match="uses"),
        ):
            bool(user.scale > 0)


def test_the_last_stage_sees_its_own() -> None:
    user, layers, _ = cut_on(1)
    with layers.in_step(is_last=True):
        assert user.scale == 1.0
        with layers.in_call(user.scale):
            pass


def test_a_call_outside_of_a_step_says_where_it_may_be() -> None:
    user, _, _ = cut_on(0)
    with pytest.raises(ValueError, match=r"'head' was called on a rank without its parameters"):
        user.head(torch.ones(1, 2))
    user, _, _ = cut_on(1)
    assert isinstance(user.head(torch.ones(1, 2)), Tensor)


def test_parameters_count_for_the_last_stage() -> None:
    user = User()
    user.head = user.tied = nn.Linear(2, 7)
    assert choose_partition(find_layers(user, "net")[1], "parameters", 2) == (3, 1)
    assert choose_partition(find_layers(user.net, "auto")[1], "parameters", 2) == (2, 2)

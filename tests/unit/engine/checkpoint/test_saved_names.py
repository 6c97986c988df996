from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_dist.engine.checkpoint.saved_names import names_of_saved, sharding_what_is_loaded


def _rename(state: dict[str, Any], prefix: str, name: str, other: str) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
        state[key.replace(f"{prefix}{name}.", f"{prefix}{other}.")] = state.pop(key)


class Renamed(nn.Module):
    """Calls its layer otherwise in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_state_dict_post_hook(
            lambda _, state, prefix, *__: _rename(state, prefix, "linear", "projection")
        )
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *__: _rename(state, prefix, "projection", "linear")
        )


def test_names_behind_hooks_and_without() -> None:
    names = names_of_saved(nn.ModuleDict({"a": Renamed()}))
    assert names.pop("a.projection.weight") == "a.linear.weight"
    assert names.pop("a.projection.bias") == "a.linear.bias"
    assert {"a.norm.weight", "a.norm.running_mean", "a.norm.num_batches_tracked"} <= names.keys()
    assert all(key == name for key, name in names.items())


def test_a_shared_parameter_keeps_each_name() -> None:
    shared = nn.Linear(2, 2)
    names = names_of_saved(nn.ModuleDict({"a": shared, "b": shared}))
    assert names == {key: key for key in ("a.weight", "a.bias", "b.weight", "b.bias")}


def test_hooks_are_gone_behind_a_load() -> None:
    module = Renamed()
    state = {name: torch.full_like(value, 2) for name, value in module.state_dict().items()}
    count = len(module._load_state_dict_pre_hooks)
    with sharding_what_is_loaded(module):
        module.load_state_dict(state)
    assert bool((module.linear.weight == 2).all())
    assert len(module._load_state_dict_pre_hooks) == count
    assert not module.linear._load_state_dict_pre_hooks

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lightning_dist.engine.checkpoint.saved_names import names_of_saved, take_whole_tensors
from lightning_dist.engine.tensors.dtensor import cut, local_part
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank


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


def test_a_whole_state_is_sharded_behind_hooks_that_rename() -> None:
    whole = Renamed()
    state = {n: torch.randn_like(v) if v.is_floating_point() else v for n, v in named(whole)}
    with fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        module = Renamed()
        shard = cut(module.linear.weight.detach(), mesh, [Shard(0)])
        module.linear.weight = nn.Parameter(shard)
        take_whole_tensors(module)
        module.load_state_dict(state)
        assert torch.equal(local_part(module.linear.weight), state["projection.weight"][1:])
        assert torch.equal(module.linear.bias, state["projection.bias"])
        module.load_state_dict(module.state_dict())  # shards as well
        assert torch.equal(local_part(module.linear.weight), state["projection.weight"][1:])
        state["projection.weight"] = torch.zeros(3, 2)
        with pytest.raises(RuntimeError, match="size mismatch for linear.weight"):
            module.load_state_dict(state)


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value.clone()) for name, value in module.state_dict().items()]

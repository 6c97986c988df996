"""Where a module has its shards, and where the gathered copies of them.

FSDP2 puts whole copies in place of a unit's shards for its forward. Copies that it does not free
behind the forward it leaves there until the backward. But gradients and optimizers are of the
shards: of the copies, a hook between the two passes would read no gradient in ``parameter.grad``,
and ``module.zero_grad()`` would clear none. So there the module has its shards, while the copies
wait for the backward.

FSDP2 has no public function for this, nor for which copies belong to which shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState


def param_groups(root: nn.Module) -> Iterator[Any]:
    """Yields the groups of parameters of all units in a module."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from groups_of(module)


def groups_of(module: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that FSDP2 gathers for a module's own call."""
    state: Any = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # in newer versions
    return [*filter(None, [state._fsdp_param_group] if found is None else found)]


def show_shards(groups: Iterable[Any]) -> None:
    """Puts the shards back in their places; what is gathered stays so.

    What has been frozen or thawed while the copies were there, is so as shards.
    """
    for parameter in _parameters(groups):
        if parameter.sharded_state is ShardedState.SHARDED:
            continue
        if _shown(parameter) is not parameter.sharded_param:
            parameter.sharded_param.requires_grad_(_shown(parameter).requires_grad)
        parameter._setattr_on_modules(parameter.sharded_param)


def show_gathered(groups: Iterable[Any]) -> None:
    """Puts the copies of what is gathered in the places of the shards, frozen where these are."""
    for parameter in _parameters(groups):
        is_gathered = parameter.sharded_state is ShardedState.UNSHARDED
        if is_gathered and _shown(parameter) is parameter.sharded_param:
            parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
            parameter._setattr_on_modules(parameter._unsharded_param)


def _parameters(groups: Iterable[Any]) -> Iterator[Any]:
    for group in groups:
        yield from group.fsdp_params


def _shown(parameter: Any) -> nn.Parameter:
    """Returns what is in a parameter's place: the shard, or a copy."""
    place = parameter._module_info
    found: nn.Parameter = place.module._parameters[place.param_name]
    return found


def show_gathered_in_calls(unit: nn.Module) -> None:
    """Lets a unit have its copies in each of its calls, those that have waited for it, too."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def show(module: FSDPModule, _: object) -> None:
        show_gathered(groups_of(module))

    unit.register_forward_pre_hook(show)


def show_shards_behind_calls(root: nn.Module) -> None:
    """Lets all units have their shards again behind each of their calls."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def show(module: FSDPModule, *_: object) -> None:
        show_shards(groups_of(module))

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(show)

"""Where a module has its shards, and where the gathered copies of them.

FSDP2 puts whole copies in place of a unit's shards for its forward. Copies that it does not free
behind the forward it leaves there until the backward. But gradients and optimizers are of the
shards: of the copies, a hook between the two passes would read no gradient in ``parameter.grad``,
and ``module.zero_grad()`` would clear none. So there the module has its shards, while the copies
wait for the backward. Another call gathers anew, for hooks may have written into the shards.

FSDP2 has no public function for this, nor for which copies belong to which shards. Nor has torch
one that tells whether a backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState


def param_groups(roots: Iterable[nn.Module | FSDPModule]) -> list[Any]:
    """Lists the groups of parameters of all units in some modules."""
    modules = (module for root in roots for module in cast(nn.Module, root).modules())
    units = (module for module in modules if isinstance(module, FSDPModule))
    return [group for unit in units for group in groups_of(unit)]


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
    for parameter in waiting(groups):
        parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
        parameter._setattr_on_modules(parameter._unsharded_param)


def gathered(groups: Iterable[Any]) -> list[Any]:
    """Lists FSDP2's descriptions of the parameters of which there are copies at the moment."""
    return [p for p in _parameters(groups) if p.sharded_state is ShardedState.UNSHARDED]


def are_gathered(groups: Iterable[Any]) -> bool:
    """Returns whether there are copies of each group's parameters, which FSDP2 gathers together."""
    firsts = (next(iter(group.fsdp_params)) for group in groups if group.fsdp_params)
    return all(first.sharded_state is ShardedState.UNSHARDED for first in firsts)


def waiting(groups: Iterable[Any]) -> list[Any]:
    """Lists those whose copies wait while their shards are shown."""
    return [p for p in gathered(groups) if _shown(p) is p.sharded_param]


def holders(groups: Iterable[Any]) -> list[nn.Module]:
    """Lists the modules whose own parameters are in some groups."""
    return [*{parameter._module_info.module: None for parameter in _parameters(groups)}]


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward, as one that recomputes a forward does."""
    return torch._C._current_graph_task_id() != -1


def _parameters(groups: Iterable[Any]) -> Iterator[Any]:
    for group in groups:
        yield from group.fsdp_params


def _shown(parameter: Any) -> nn.Parameter:
    """Returns what is in a parameter's place: the shard, or a copy."""
    place = parameter._module_info
    found: nn.Parameter = place.module._parameters[place.param_name]
    return found


def gather_for_calls(unit: nn.Module) -> None:
    """Lets a unit whose copies wait gather anew for another call.

    In the backward, which recomputes a forward, it has the copies that wait. With manual
    optimization copies stay in their places in a step, and are frozen and thawed as their shards.
    """
    seen: dict[Any, bool] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(module: FSDPModule, _: object) -> None:
        groups = groups_of(module)
        if is_in_backward():
            show_gathered(groups)
        elif waiting(groups):
            module.reshard()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def follow(module: FSDPModule, _: object) -> None:
        for parameter in _parameters(groups_of(module)):
            is_trained = parameter.sharded_param.requires_grad
            # A step may have frozen the copies themselves, which it finds by their name.
            if seen.get(parameter, is_trained) != is_trained:
                parameter._unsharded_param.requires_grad_(is_trained)
            seen[parameter] = is_trained

    unit.register_forward_pre_hook(gather, prepend=True)  # ahead of FSDP2's own
    unit.register_forward_pre_hook(follow)

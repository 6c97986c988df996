"""Finds out which trainable parameters outside of a pipelined module steps use behind it.

With layers that the user has named, all of them are. Otherwise the forward's source tells. What a
forward does not mention, only steps can use; to do so ahead of the pipelined module is an error of
the first step. What it mentions may be part of a trace, so that is tried first. If the trace fails,
the order in which the forward mentions them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from lightning_dist.engine.splitting.blocks.block_loop import is_ahead
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.loss_parameters import LossParameters
from lightning_dist.engine.tensors.forward_ast import used_by_forward

IsBehind = Callable[[nn.Module, str, str], bool]
"""Takes a module, and names of a submodule and of a parameter: whether steps use that behind it."""


def not_in_a_forward(module: nn.Module, path: str, name: str) -> bool:
    """Returns whether no forward uses the parameter, so that only steps can."""
    holder, _, own = _holder_of_both(module, path, name)
    mentioned = used_by_forward(type(holder))
    return mentioned is not None and own[0] not in mentioned


def not_ahead(module: nn.Module, path: str, name: str) -> bool:
    """Returns whether no forward calls the parameter's module, or only behind the submodule."""
    holder, part, own = _holder_of_both(module, path, name)
    mentioned = used_by_forward(type(holder))
    if mentioned is None or own[0] not in mentioned:
        return mentioned is not None
    if len(own) == 1:  # what `scale = self.scale.exp()` is used for may come later
        return part not in mentioned or not is_ahead(holder, own[0], part)
    return part in mentioned[: mentioned.index(own[0])]


def _holder_of_both(
    module: nn.Module, path: str, name: str
) -> tuple[nn.Module, str, Sequence[str]]:
    """Returns the innermost module with a submodule and a parameter.

    And the submodule's name in it, and those of the parameter on the way to it.
    """
    holder, parts, own = module, path.split("."), name.split(".")
    while parts[0] == own[0]:
        holder = holder.get_submodule(parts[0])
        parts, own = parts[1:], own[1:]
    return holder, parts[0], own


def trainable_outside(module: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters that a submodule does not hold, by all of their names.

    Those that an earlier run has found, which other ranks may lack, are not among them.
    """
    known = LossParameters.of(module).names
    inside = {id(parameter) for parameter in module.get_submodule(path).parameters()}
    named = module.named_parameters(remove_duplicate=False)
    outside = {name: p for name, p in named if p.requires_grad and name not in known}
    return {name: p for name, p in outside.items() if id(p) not in inside}


def holds_layers(module: nn.Module, path: str, is_behind: IsBehind) -> bool:
    """Returns whether a submodule holds what is trained, but for less than half behind it."""
    outside = trainable_outside(module, path)
    sizes = {id(p): p.numel() for p in outside.values()}
    inside = (p.numel() for p in module.get_submodule(path).parameters() if p.requires_grad)
    if outside and sum(sizes.values()) >= sum(inside):
        return False
    return all(is_behind(module, path, name) for name in outside)


def give_loss_parameters(module: nn.Module, path: str, layers: Layers) -> None:
    """Assigns the user's module and its loss parameters to the layers, on all ranks alike."""
    layers.users_module = module
    outside, known = trainable_outside(module, path), LossParameters.of(module)
    if not path:  # what the forward of the user's own module does not use
        known_ones = [*known.parameters().values(), *layers.placed_here()]
        in_parts = (p for part in layers.parts() for p in part.module.parameters())
        inside = {id(parameter) for parameter in (*known_ones, *in_parts)}
        named = module.named_parameters(remove_duplicate=False)
        outside = {name: p for name, p in named if p.requires_grad and id(p) not in inside}
    if outside or known.names:
        known.add(outside)
        layers.loss_parameters = known


def refuse_cuts(layers: Layers, path: str, cuts: Iterable[str]) -> None:
    """Refuses loss parameters that tensor parallelism cuts, where data ranks have shards."""
    names = sorted(layers.loss_parameters.names & {*cuts})
    if names:
        raise ValueError(
            f"Leave {names} out of the tensor-parallel plan, or make them part of the pipelined"
            f" module {path!r}: beside it, parameters are not sharded over data ranks, so the"
            " gradients of their pieces would not be averaged."
        )

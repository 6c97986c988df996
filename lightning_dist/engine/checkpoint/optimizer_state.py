"""Optimizer state by parameter name.

torch numbers an optimizer's state by position, so a rank that holds a part of the model has other
numbers than a single device. By name the state means the same under every layout. The names have
the order in which ``configure_optimizers`` grouped the whole model's parameters. So names can be
converted to the numbers of an ordinary checkpoint, and back.

In all functions ``module`` is the whole model or this rank's part, ``names`` has the names of the
whole model by group, ``named`` and ``numbered`` are state dicts, and ``firsts`` are the first names
of tied parameters in the whole model, since a part may have a later name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.checkpoint.saved_names import FirstNames
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensors.dtensor import replicate_like, shard_like
from lightning_dist.engine.tensors.tree import map_tensors, tensors_in

GroupNames = list[list[str]]
"""Names of the whole model's parameters in each group, in the order of the groups."""

_NO_TIES: FirstNames = MappingProxyType({})
_REMEDY = "Resume with the model and the `configure_optimizers` that wrote it."


def name_groups(
    optimizer: Optimizer, module: nn.Module, firsts: FirstNames = _NO_TIES
) -> GroupNames:
    """Names the parameters of an optimizer.

    Raises:
        ValueError: A parameter does not belong to the module.
    """
    names = {id(p): firsts.get(name, name) for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not"
                    " a parameter of the module, so it has no name in a checkpoint. Assign it (or"
                    " its module) to an attribute of the LightningModule, and make the optimizer"
                    " in `configure_optimizers`, which sees what the strategy has made of them."
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def keep_own_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Removes the parameters of other ranks, and their state, from an optimizer; its groups stay.

    Some optimizers create state when they are built.
    """
    own = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in own]
    for foreign in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in own]:
        del optimizer.state[foreign]


def regroup(
    optimizer: Optimizer, module: nn.Module, names: GroupNames, firsts: FirstNames = _NO_TIES
) -> None:
    """Puts this rank's present parameters into an optimizer's groups, in place for schedulers."""
    own = {firsts.get(name, name): p for name, p in module.named_parameters()}
    for group, all_names in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [own[name] for name in all_names if name in own]


def state_by_name(
    optimizer: Optimizer, module: nn.Module, names: GroupNames, firsts: FirstNames = _NO_TIES
) -> dict[str, Any]:
    """Returns an optimizer's state with names for numbers, and all names in its groups."""
    own = name_groups(optimizer, module, firsts)
    # Lightning's stand-in, where `configure_optimizers` returns None, has neither.
    state_dict = {"state": {}, "param_groups": [], **optimizer.state_dict()}
    order = [name for group in own for name in group]
    state = {order[index]: values for index, values in state_dict["state"].items()}
    return {"state": state, "param_groups": _with_params(state_dict["param_groups"], names)}


def _with_params(groups: Sequence[Mapping[str, Any]], params: Iterable[Iterable[Any]]) -> list[Any]:
    return [{**group, "params": list(own)} for group, own in zip(groups, params, strict=True)]


def is_named(state: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer state dict has names for numbers."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def to_numbers(named: Mapping[str, Any]) -> dict[str, Any]:
    """Converts all or a part of an optimizer state dict by names to an ordinary one."""
    groups = named["param_groups"]
    names = dict.fromkeys(name for group in groups for name in group["params"])
    numbers = {name: number for number, name in enumerate(names)}
    params = ([numbers[name] for name in group["params"]] for group in groups)
    state = {numbers[name]: values for name, values in named["state"].items()}
    return {"state": state, "param_groups": _with_params(groups, params)}


def to_names(numbered: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Converts an ordinary optimizer state dict to names; the inverse of :func:`to_numbers`.

    Raises:
        ValueError: The groups do not match.
    """
    groups = numbered["param_groups"]
    _check_sizes(groups, names)
    name_of = {
        number: name
        for group, group_names in zip(groups, names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    state = {name_of[number]: values for number, values in numbered["state"].items()}
    return {"state": state, "param_groups": _with_params(groups, names)}


def by_present_names(
    states: Sequence[Mapping[str, Any]], names: Sequence[GroupNames]
) -> list[dict[str, Any]]:
    """Returns states of names or numbers by names, in the order of the present optimizers.

    Raises:
        ValueError: The optimizers or their groups do not match.
    """
    if len(states) != len(names):
        raise ValueError(
            f"The checkpoint has the states of {len(states)} optimizers, and `configure_optimizers`"
            f" made {len(names)}. {_REMEDY}"
        )
    return [
        _in_present_groups(state, of_optimizer)
        if is_named(state)
        else to_names(state, of_optimizer)
        for state, of_optimizer in zip(states, names, strict=True)
    ]


def _in_present_groups(named: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    groups = named["param_groups"]
    _check_sizes(groups, names)
    for index, (group, now) in enumerate(zip(groups, names, strict=True)):
        gone, new = set(group["params"]) - set(now), set(now) - set(group["params"])
        if gone:
            raise ValueError(
                f"Parameter group {index} of the checkpoint's optimizer has"
                f" {shorten(sorted(gone), 3)}, where the present one has {shorten(sorted(new), 3)}."
                f" {_REMEDY}"
            )
    return {**named, "param_groups": _with_params(groups, names)}


def _check_sizes(groups: Iterable[Mapping[str, Any]], names: GroupNames) -> None:
    before, now = [len(group["params"]) for group in groups], [len(group) for group in names]
    if before != now:
        raise ValueError(
            f"The checkpoint's optimizer has groups of {before} parameters, the present one of"
            f" {now}. {_REMEDY}"
        )


def split_entries(entries: Mapping[Any, Any]) -> tuple[dict[str, Tensor], dict[Any, Any]]:
    """Separates a parameter's state into tensors by key, and the rest.

    A tensor in a container, or under a key that is no identifier, is keyed by a number. In the rest
    an empty tensor has its place.
    """
    named = {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and isinstance(key, str) and key.isidentifier()
    }
    others = {key: value for key, value in entries.items() if key not in named}
    numbered = {str(number): tensor for number, tensor in enumerate(tensors_in(others))}
    return {**named, **numbered}, map_tensors(lambda _: torch.empty(0), others)


def join_entries(tensors: Mapping[str, Tensor], rest: Mapping[Any, Any]) -> dict[Any, Any]:
    """Joins a parameter's state again; where tensors are missing, the rest keeps its own."""
    numbers = count()
    others = map_tensors(lambda left: tensors.get(str(next(numbers)), left), dict(rest))
    named = {key: tensor for key, tensor in tensors.items() if not key.isdecimal()}
    return {**others, **named}


def load_by_name(
    optimizer: Optimizer, module: nn.Module, named: Mapping[str, Any], firsts: FirstNames = _NO_TIES
) -> None:
    """Loads this rank's part of an optimizer state.

    State of a sharded parameter's shape is sharded like the parameter, without communication, also
    in containers. What has another shape, and is no number, is whole on each rank.
    """
    own = name_groups(optimizer, module, firsts)
    numbers = {name: i for i, name in enumerate(name for group in own for name in group)}
    parameters = {firsts.get(name, name): p for name, p in module.named_parameters()}
    state = {
        numbers[name]: _sharded_state(values, parameters[name])
        for name, values in named["state"].items()
        if name in numbers
    }
    params = ([numbers[name] for name in group] for group in own)
    groups = _with_params(named["param_groups"], params)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _sharded_state(values: Mapping[Any, Any], parameter: Tensor) -> Any:
    def placed(value: Tensor) -> Tensor:
        if value.shape == parameter.shape:
            return shard_like(value, parameter)
        # Statistics of rows or columns: torch mixes only numbers with shards.
        return replicate_like(value, parameter) if value.numel() > 1 else value

    return map_tensors(placed, values)

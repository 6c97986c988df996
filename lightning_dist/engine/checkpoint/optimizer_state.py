"""Optimizer state by parameter name.

torch numbers an optimizer's state by position, so a rank that holds a part of the model has other
numbers than a single device. By name the state means the same under every layout. The order of the
names is the one in which ``configure_optimizers`` grouped the whole model's parameters, so the
numbers of an ordinary checkpoint can be made from the names, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.checkpoint.tied_names import FirstNames
from lightning_dist.engine.tensors.dtensor import shard_like

GroupNames = list[list[str]]
"""Names of the whole model's parameters in each group, in the order of the groups."""

_NO_TIES: FirstNames = MappingProxyType({})


def name_groups(
    optimizer: Optimizer, module: nn.Module, firsts: FirstNames = _NO_TIES
) -> GroupNames:
    """Names the parameters of an optimizer.

    Args:
        optimizer: Of the module's parameters.
        module: The whole model, or what this rank holds of it.
        firsts: In the whole model, where a part of it may know a tied parameter by another name.

    Raises:
        ValueError: A parameter is not the module's.
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
    """Takes the parameters of other ranks, and their state, out of an optimizer; its groups stay.

    Args:
        optimizer: Built on the whole model. Some optimizers make their state when they are built.
        module: What this rank holds of it.
    """
    own = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in own]
    for foreign in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in own]:
        del optimizer.state[foreign]


def regroup(
    optimizer: Optimizer, module: nn.Module, names: GroupNames, firsts: FirstNames = _NO_TIES
) -> None:
    """Gives an optimizer the parameters that this rank has now; its groups stay what they are.

    Args:
        optimizer: This rank's; those who hold it, such as schedulers, hold the same one after.
        module: What this rank holds of the model.
        names: All parameters' names by group.
        firsts: As for :func:`name_groups`.
    """
    own = {firsts.get(name, name): p for name, p in module.named_parameters()}
    for group, all_names in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [own[name] for name in all_names if name in own]


def state_by_name(
    optimizer: Optimizer, module: nn.Module, names: GroupNames, firsts: FirstNames = _NO_TIES
) -> dict[str, Any]:
    """Gives an optimizer's state with names for numbers.

    Args:
        optimizer: This rank's.
        module: What this rank holds of the model.
        names: All parameters' names by group.
        firsts: As for :func:`name_groups`.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [all names]}]}``; the state of
        this rank's parameters only.
    """
    own = name_groups(optimizer, module, firsts)
    # Lightning's stand-in, where `configure_optimizers` returns None, has neither.
    state_dict = {"state": {}, "param_groups": [], **optimizer.state_dict()}
    order = [name for group in own for name in group]
    state = {order[index]: values for index, values in state_dict["state"].items()}
    groups = [
        {**group, "params": list(all_names)}
        for group, all_names in zip(state_dict["param_groups"], names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def is_named(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer state dict has names for numbers.

    Args:
        state: An ordinary one, or what :func:`state_by_name` gives.
    """
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def to_numbers(named: Mapping[str, Any]) -> dict[str, Any]:
    """Makes an ordinary optimizer state dict from one by names.

    Args:
        named: What :func:`state_by_name` gives; may hold any part of the states.
    """
    numbers: dict[str, int] = {}
    for group in named["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {
        "state": {numbers[name]: values for name, values in named["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in named["param_groups"]
        ],
    }


def to_names(numbered: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Names the state of an ordinary optimizer state dict; the inverse of :func:`to_numbers`.

    Args:
        numbered: From an ordinary checkpoint.
        names: The present optimizer's parameters' names by group.

    Raises:
        ValueError: The groups do not match.
    """
    groups = numbered["param_groups"]
    saved, present = [len(g["params"]) for g in groups], [len(g) for g in names]
    if saved != present:
        raise ValueError(
            f"The checkpoint's optimizer has groups of {saved} parameters, the present one of"
            f" {present}. Resume with the model and the `configure_optimizers` that wrote it."
        )
    name_of = {
        number: name
        for group, group_names in zip(groups, names, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    return {
        "state": {name_of[number]: values for number, values in numbered["state"].items()},
        "param_groups": [
            {**group, "params": list(group_names)}
            for group, group_names in zip(groups, names, strict=True)
        ],
    }


def add_groups(
    optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any], firsts: FirstNames = _NO_TIES
) -> None:
    """Adds the groups that an optimizer had when it was saved, and has not got yet.

    Args:
        optimizer: Changed.
        module: The model, all of whose parameters are here, in whole or in part.
        state: Of the optimizer; of an ordinary one nothing is known of what is in its groups.
        firsts: As for :func:`name_groups`.
    """
    parameters = {firsts.get(name, name): p for name, p in module.named_parameters()}
    for group in state["param_groups"][len(optimizer.param_groups) :] if is_named(state) else ():
        added = [parameters[name] for name in group["params"] if name in parameters]
        optimizer.add_param_group({**group, "params": added})


def load_by_name(
    optimizer: Optimizer,
    module: nn.Module,
    named: Mapping[str, Any],
    firsts: FirstNames = _NO_TIES,
) -> None:
    """Loads the part of a state that is this rank's.

    State of a sharded parameter's shape is sharded like it; no rank waits for another.

    Args:
        optimizer: This rank's.
        module: What this rank holds of the model.
        named: Of the whole model or any part that holds this rank's.
        firsts: As for :func:`name_groups`.
    """
    own: Sequence[Sequence[str]] = name_groups(optimizer, module, firsts)
    numbers = {name: i for i, name in enumerate(name for group in own for name in group)}
    position = iter(range(len(numbers)))
    parameters = {firsts.get(name, name): p for name, p in module.named_parameters()}
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: _sharded_state(values, parameters[name])
                for name, values in named["state"].items()
                if name in numbers
            },
            "param_groups": [
                {**group, "params": [next(position) for _ in group_names]}
                for group, group_names in zip(named["param_groups"], own, strict=True)
            ],
        }
    )


def _sharded_state(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    return {
        key: shard_like(value, parameter)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in values.items()
    }

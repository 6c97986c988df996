"""Find the blocks of a model that is no sequence, and what runs before and behind them.

A Hugging Face model says so in its pipeline plan, ``model.pp_plan``: of each part, the names of
what it takes and gives. Where it has none, its blocks are the ones that it repeats, and its code
tells what comes before them. The same goes for the ``nn.ModuleList`` of any other model that
``layers=`` names.

Transformers need not be installed: a model of its kind is known by its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_dist.engine.splitting.blocks import Blocks
from lightning_dist.engine.tensors.forward_ast import runs_before
from lightning_dist.engine.tensors.repeated_blocks import repeated_blocks

Plan = Mapping[str, tuple[list[str], list[str]]]
"""What each part of a model takes and gives."""


def find_model(module: nn.Module) -> str | None:
    """Finds the Hugging Face model that holds all trainable parameters.

    Args:
        module: The user's, whole.

    Returns:
        Its dotted path; None if there is none.

    Raises:
        ValueError: One holds some of them, and no ``nn.Sequential`` holds all.
    """
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    models: list[str] = [n for n, m in module.named_modules() if n and _is_hugging_face(m)]
    for name in models:
        if trainable <= _ids(module.get_submodule(name)):
            return name
    holders = [name for name in models if trainable & _ids(module.get_submodule(name))]
    sequences = (m for m in module.modules() if isinstance(m, nn.Sequential))
    if not holders or any(trainable <= _ids(sequence) for sequence in sequences):
        return None
    inside = _ids(module.get_submodule(holders[0]))
    outside = next(
        n for n, p in module.named_parameters() if p.requires_grad and id(p) not in inside
    )
    raise ValueError(
        "Take a model with that head (`AutoModelForSequenceClassification`, say), or put both into"
        " one module whose forward runs them and name its list of blocks with `layers=`, or freeze"
        f" the head with `requires_grad_(False)`: the trainable parameter {outside!r} is outside of"
        f" the model {holders[0]!r}, so it would belong to no stage."
    )


def find_blocks(model: nn.Module, path: str) -> Blocks:
    """Finds the blocks of a Hugging Face model.

    Args:
        model: The model, whole.
        path: What the user's module calls it.

    Raises:
        ValueError: They are not clear.
    """
    lists = [name for name in _plan_of(model) if _is_list(model, name)]
    if len(lists) != 1:
        lists = list(dict.fromkeys(name.rpartition(".")[0] for name in repeated_blocks(model)))
        lists = [name for name in lists if _is_list(model, name)]
    if not lists:
        raise ValueError(
            "Give the model a pipeline plan (`model.pp_plan = {...}`), or put an `nn.Sequential` of"
            f" its layers into your module: {type(model).__name__} has no pipeline plan, and no"
            " list of blocks that it repeats."
        )
    if len(lists) > 1:
        choices = " or ".join(f"layers='{path}.{name}'" for name in lists)
        raise ValueError(
            f"Pass {choices}: {type(model).__name__} has several lists of blocks. What runs before"
            " the blocks of the list goes to the first stage, what runs behind them to the last."
        )
    return blocks_of(model, lists[0], path)


def blocks_of(model: nn.Module, list_path: str, path: str) -> Blocks:
    """Sorts a model's parts into what runs before its blocks and behind them.

    Args:
        model: The model, whole.
        list_path: Dotted path of the ``nn.ModuleList`` of its blocks.
        path: What the user's module calls the model.

    Raises:
        ValueError: A trainable parameter is in no part.
    """
    sides = _sides(_plan_of(model), list_path)
    before: list[str] = []
    after: list[str] = []
    holder_name = ""
    for step in list_path.split("."):
        holder = model.get_submodule(holder_name)
        _refuse_own_parameters(holder, holder_name, path)
        prefix = f"{holder_name}." if holder_name else ""
        for child, part in holder.named_children():
            if child == step or not any(True for _ in part.parameters()):
                continue
            name = prefix + child
            is_before = sides.get(name, runs_before(holder, child, step))
            (before if is_before else after).append(name)
        holder_name = prefix + step
    return Blocks(model, list_path, before, after)


def _sides(plan: Plan, list_path: str) -> dict[str, bool]:
    """Tells of each part in a plan whether it runs before the blocks.

    What runs behind them takes what they give: ``hidden_states``.
    """
    if list_path not in plan:
        return {}
    _, given = plan[list_path]
    return {name: not set(taken) & set(given) for name, (taken, _) in plan.items()}


def _plan_of(model: nn.Module) -> Plan:
    plan = getattr(model, "pp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _is_hugging_face(module: nn.Module) -> bool:
    # Of the class: wrappers hand on the attributes of what they wrap.
    return hasattr(type(module), "pp_plan") and hasattr(module, "config")


def _is_list(model: nn.Module, name: str) -> bool:
    found: Any = dict(model.named_modules()).get(name)
    return isinstance(found, nn.ModuleList)


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _refuse_own_parameters(holder: nn.Module, name: str, path: str) -> None:
    for own in _trainable_of_its_own(holder):
        full_name = ".".join(filter(None, (path, name, own)))
        raise ValueError(
            f"Move {full_name!r} into a submodule that runs before or behind the blocks, or freeze"
            f" it with `requires_grad_(False)`: it is of a {type(holder).__name__} that runs on all"
            " stages, for it holds the blocks, so it would belong to no stage."
        )


def _trainable_of_its_own(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            yield name

"""Finds the blocks of a model that is no sequence, and the modules that run before and after them.

A Hugging Face model has a pipeline plan, ``model.pp_plan``: the names of each part's inputs and
outputs. Without a plan, the blocks are those that the model repeats, and the forward's source shows
which modules run before them. The same goes for any other model with an ``nn.ModuleList``, or with
an ``nn.Sequential`` that its forward calls.

Transformers need not be installed: its models are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_dist.engine.splitting.blocks.block_loop import is_ahead
from lightning_dist.engine.splitting.blocks.blocks import Blocks
from lightning_dist.engine.splitting.find_loss_parameters import (
    IsBehind,
    holds_layers,
    trainable_outside,
)
from lightning_dist.engine.splitting.placed_parameters import FirstParameters, LastParameters
from lightning_dist.engine.tensors.forward_ast import runs_before, used_by_forward
from lightning_dist.engine.tensors.module_tree import dotted, original_class, outermost
from lightning_dist.engine.tensors.repeated_blocks import repeated_blocks

Plan = Mapping[str, tuple[list[str], list[str]]]
"""Names of the inputs and outputs of each part of a model."""


class LayersNotFoundError(ValueError):
    """A module has no layers that can be found without a trace."""


class SeveralListsError(LayersNotFoundError):
    """A model has several lists of blocks, of which the user has to name one."""


def find_model(module: nn.Module, is_behind: IsBehind) -> str | None:
    """Returns the path of the Hugging Face model that holds the trainable parameters.

    Returns:
        The model's dotted path; None if there is no such model.

    Raises:
        ValueError: A model holds some trainable parameters, and no ``nn.Sequential`` holds all.
    """
    trainable = trainable_ids(module)
    # By the class, for wrappers forward the attributes of the wrapped model.
    held: dict[str, set[int]] = {
        name: parameter_ids(part)
        for name, part in module.named_modules()
        if name and hasattr(type(part), "pp_plan") and hasattr(part, "config")
    }
    for name, inside in held.items():
        if trainable <= inside:
            return name
    holders = outermost([name for name, inside in held.items() if trainable & inside])
    if not holders or is_in_a_sequence(module, is_behind):
        return None
    if len(holders) == 1 and holds_layers(module, holders[0], is_behind):
        return holders[0]
    outside = next(iter(trainable_outside(module, holders[0])))
    raise ValueError(
        "Take a model with that head (`AutoModelForSequenceClassification`, say), or put both into"
        " one module whose forward runs them and name its list of blocks with `layers=`, or freeze"
        f" the head with `requires_grad_(False)`: the trainable parameter {outside!r} is outside of"
        f" the model {holders[0]!r}."
    )


def find_blocks(model: nn.Module, path: str) -> Blocks:
    """Returns the blocks of a Hugging Face model, at a path in the user's module.

    Raises:
        ValueError: There is no list of blocks, or more than one.
    """
    lists = [name for name in _plan_of(model) if is_module_list(model, name)]
    if len(lists) != 1:
        lists = list(dict.fromkeys(name.rpartition(".")[0] for name in repeated_blocks(model)))
        lists = [name for name in lists if is_module_list(model, name)]
    if not lists:
        raise ValueError(
            "Give the model a pipeline plan (`model.pp_plan = {...}`), or put an `nn.Sequential` of"
            f" its layers into your module: {type(model).__name__} has no pipeline plan, and no"
            " list of blocks that it repeats."
        )
    if len(lists) > 1:
        choices = " or ".join(f"layers='{path}.{name}'" for name in lists)
        raise SeveralListsError(
            f"Pass {choices}: {type(model).__name__} has several lists of blocks. What runs before"
            " the blocks of the list goes to the first stage, what runs behind them to the last."
        )
    return blocks_of(model, lists[0], path)


def blocks_of(model: nn.Module, list_path: str, path: str) -> Blocks:
    """Returns a model's blocks, and its other parts sorted by whether they run before the blocks.

    Raises:
        ValueError: A trainable parameter that is in no part is also in one.
    """
    sides = _sides(_plan_of(model), list_path)
    ahead, behind = FirstParameters.of(model), LastParameters.of(model)
    ahead.prefix = behind.prefix = f"{path}." if path else ""
    before: list[str] = []
    after: list[str] = []
    known_sides: dict[nn.Module, bool] = {}
    holder_name = ""
    for step in list_path.split("."):
        holder = model.get_submodule(holder_name)
        used = None if dotted(path, holder_name) else used_by_forward(type(holder))
        for own, key, parameter in _own_parameters(holder):
            name = dotted(holder_name, own, key)
            is_known = name in ahead or name in behind
            if parameter.requires_grad and not is_known and (used is None or own in used):
                _refuse_shared(model, name, path)
                (ahead if is_ahead(holder, own, step) else behind).add({name: parameter})
        for child, part in holder._modules.items():  # all names of a module that has several
            if part is None or child == step or not _belongs_to_a_stage(part):
                continue
            if used is not None and child not in used:
                continue  # of the user's own module, whose steps use it
            name = dotted(holder_name, child)
            is_before = known_sides.setdefault(
                part, sides.get(name, runs_before(holder, child, step))
            )
            (before if is_before else after).append(name)
        holder_name = dotted(holder_name, step)
    return Blocks(model, list_path, before, after, direct=(ahead, behind))


_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)


def _own_parameters(holder: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Lists the attribute, the place in it, and each parameter that a module holds itself."""
    for own, parameter in holder.named_parameters(recurse=False):
        yield own, "", parameter
    for own, part in holder.named_children():
        if isinstance(part, _OF_PARAMETERS):  # a module, but one that is read and not called
            for key, parameter in part.named_parameters(recurse=False):
                yield own, key, parameter


def _belongs_to_a_stage(part: nn.Module) -> bool:
    """Returns whether a module has weights, or statistics of what it is given."""
    has_statistics = any(isinstance(module, _BatchNorm) for module in part.modules())
    has_weights = any(True for _ in part.parameters())
    return not isinstance(part, _OF_PARAMETERS) and (has_weights or has_statistics)


def _sides(plan: Plan, list_path: str) -> dict[str, bool]:
    """Returns for each part in a plan whether it runs before the blocks."""
    if list_path not in plan:
        return {}
    _, given = plan[list_path]  # `hidden_states`, which a part after the blocks takes
    return {name: not set(taken) & set(given) for name, (taken, _) in plan.items()}


def _plan_of(model: nn.Module) -> Plan:
    plan = getattr(model, "pp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def is_sequence_of_blocks(part: nn.Module, model: nn.Module) -> bool:
    """Returns whether a part is a plain ``nn.Sequential`` of at least two blocks.

    They are alike, and the model trains no others of their class: linear layers are no blocks, and
    the blocks of a ResNet are in several sequences, of which none is the model's.
    """
    if not isinstance(part, nn.Sequential) or type(part).forward is not nn.Sequential.forward:
        return False
    blocks = [block for block in part._modules.values() if block is not None]
    kinds = [
        (original_class(block), [(name, p.shape) for name, p in block.named_parameters()])
        for block in blocks
    ]
    if len(blocks) < 2 or any(kind != kinds[0] for kind in kinds):
        return False
    others = {*model.modules()} - {*part.modules()}
    return not any(
        original_class(other) is kinds[0][0] and trainable_ids(other) for other in others
    )


def is_module_list(module: nn.Module, path: str) -> bool:
    """Returns whether a path in a module names an ``nn.ModuleList``."""
    return isinstance(dict(module.named_modules()).get(path), nn.ModuleList)


def is_in_a_sequence(module: nn.Module, is_behind: IsBehind) -> bool:
    """Returns whether an ``nn.Sequential`` in a module holds the trainable parameters."""
    sequences = (n for n, m in module.named_modules() if isinstance(m, nn.Sequential))
    return any(holds_layers(module, name, is_behind) for name in sequences)


def parameter_ids(module: nn.Module) -> set[int]:
    """Returns the ids of a module's parameters."""
    return {id(parameter) for parameter in module.parameters()}


def trainable_ids(module: nn.Module) -> set[int]:
    """Returns the ids of a module's parameters that require gradients."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def _refuse_shared(model: nn.Module, name: str, path: str) -> None:
    parameter = model.get_parameter(name)
    named = model.named_parameters(remove_duplicate=False)
    others = [other for other, p in named if p is parameter and other != name]
    if others:
        raise ValueError(
            f"Move {dotted(path, name)!r} into a submodule that runs before or behind the blocks,"
            f" as an `nn.Embedding`: it is {dotted(path, others[0])!r}, too, so two stages may need"
            " it, and a module that holds the blocks runs on all of them."
        )

"""Finds the module to cut, and raises errors for modules that cannot be cut.

All checks look at the module alone, so each rank finds the same before any communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from lightning_dist.engine.planning.partition import partition_layers, uniform_partition
from lightning_dist.engine.splitting.blocks.block_loop import loops_over
from lightning_dist.engine.splitting.blocks.find_blocks import (
    LayersNotFoundError,
    blocks_of,
    find_blocks,
    find_model,
    is_in_a_sequence,
    is_module_list,
    is_sequence_of_blocks,
    parameter_ids,
    trainable_ids,
)
from lightning_dist.engine.splitting.cut import structure_of, whole
from lightning_dist.engine.splitting.find_loss_parameters import (
    IsBehind,
    give_loss_parameters,
    holds_layers,
    not_ahead,
    not_in_a_forward,
    trainable_outside,
)
from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.splitting.ties import Tie
from lightning_dist.engine.tensors.forward_ast import used_by_forward
from lightning_dist.engine.tensors.module_tree import count_parameters, dotted, outermost

_CONTAINERS = (nn.ModuleDict, nn.ModuleList)  # without a forward


def find_layers(module: nn.Module, layers: str, *, by_forwards: bool = False) -> tuple[str, Layers]:
    """Returns the layers of the user's module.

    ``"auto"`` takes the blocks of a Hugging Face model, or the children of one ``nn.Sequential``,
    or the blocks that a forward runs one after the other. The module with these layers must hold
    most of the trainable parameters; the others are the last stage's.

    It may be the user's module itself, if its forward runs the blocks.

    Args:
        module: The user's module, cut or not.
        layers: ``"auto"``, or the dotted path of an ``nn.Sequential`` or an ``nn.ModuleList``.
        by_forwards: Whether ``"auto"`` takes what the order in forwards tells. A trace is surer:
            a step need not call the forward of its own module.

    Returns:
        The path of the pipelined module, and its layers.

    Raises:
        LayersNotFoundError: ``"auto"`` finds no layers.
        ValueError: The path has no layers.
    """
    if layers == "auto":
        try:
            path, found = _find_layers(module, by_forwards=by_forwards)
        except LayersNotFoundError:
            raise
        except ValueError as error:
            raise LayersNotFoundError(str(error)) from None
    else:
        path, found = _named_layers(module, layers)
    give_loss_parameters(module, path, found)
    return path, found


def _named_layers(module: nn.Module, layers: str) -> tuple[str, Layers]:
    with whole(module):
        part = dict(module.named_modules()).get(layers)
        if isinstance(part, nn.ModuleList | nn.Sequential):
            path = _holder_of(module, layers, part)
            if path != layers:
                return _blocks_in(module, path, layers)
    return _sequence_in(*_get(module, layers))


def _holder_of(module: nn.Module, layers: str, part: nn.ModuleList | nn.Sequential) -> str:
    """Returns the path of the pipelined module by that of its layers.

    It is the sequence itself, the model that holds it or a list, or the user's module: the first
    ahead of which the forwards around it use no trainable parameters.
    """
    holder, _, inner = layers.partition(".")
    first = [layers] if isinstance(part, nn.Sequential) else []
    around = [path for path in dict.fromkeys((holder if inner else "", "")) if path != layers]
    for path in (*first, *(path for path in around if _mentions(module, path, layers))):
        names = trainable_outside(module, path)
        if not path or all(not_ahead(module, path, name) for name in names):
            return path
    if not first and (not inner or isinstance(module.get_submodule(holder), _CONTAINERS)):
        raise ValueError(
            "Put the model into a module of its own, whose forward runs the blocks:"
            f" layers={layers!r} is an `nn.ModuleList` of the LightningModule itself, which has"
            " steps, but no forward of the model to cut."
        )
    return layers if first else holder


def _mentions(module: nn.Module, path: str, layers: str) -> bool:
    """Returns whether forwards lead from a module to the layers in it, through dicts and lists."""
    part = module.get_submodule(path)
    if isinstance(part, _CONTAINERS):
        return False
    for step in layers.removeprefix(f"{path}.").split("."):
        is_used = step in (used_by_forward(type(part)) or ())
        if not (is_used or isinstance(part, _CONTAINERS)):
            return False
        part = part.get_submodule(step)
    return True


def _find_layers(module: nn.Module, *, by_forwards: bool) -> tuple[str, Layers]:
    is_behind = not_ahead if by_forwards else not_in_a_forward
    with whole(module):
        path = find_model(module, is_behind)
        if path is not None:
            return path, find_blocks(module.get_submodule(path), path)
        is_in_one = is_in_a_sequence(module, is_behind)
        chain = None if is_in_one else _find_chain(module, is_behind, by_forwards=by_forwards)
        if chain is not None:
            return _blocks_in(module, *chain)
        path, sequence = _find_trainable(module, is_behind)
    return _sequence_in(path, sequence)


def _find_chain(
    module: nn.Module, is_behind: IsBehind, *, by_forwards: bool
) -> tuple[str, str] | None:
    """Returns the path of a model, and of the one list of blocks that its forward runs in order.

    Without a trace smaller lists in the model are just parts of it, as stages of a ResNet are.
    """
    lists = []
    for name, part in module.named_modules():
        holder, _, inner = name.partition(".")
        model = module.get_submodule(holder) if inner else module
        if isinstance(part, nn.ModuleList) or is_sequence_of_blocks(part, model):
            lists.append(name)
    chains: dict[str, list[str]] = {}
    for name in outermost(lists):
        holder, _, inner = name.partition(".")
        paths = [holder] if inner and loops_over(module.get_submodule(holder), inner) else []
        paths += [""] if by_forwards and loops_over(module, name) else []
        if paths and len(list(module.get_submodule(name).children())) > 1:
            chains[name] = paths
    trained = [name for name in chains if trainable_ids(module.get_submodule(name))]  # no teacher
    chains = {name: chains[name] for name in trained or chains}
    sizes = {name: count_parameters(module.get_submodule(name)) for name in chains}
    large = [name for name, size in sizes.items() if 2 * size >= max(sizes.values())]
    is_clear = by_forwards or len(chains) == 1 or all(is_module_list(module, n) for n in large)
    if len(large) != 1 or not is_clear:
        return None
    fitting = [path for path in chains[large[0]] if holds_layers(module, path, is_behind)]
    return (fitting[0], large[0]) if fitting else None


def _blocks_in(module: nn.Module, path: str, layers: str) -> tuple[str, Layers]:
    list_path = layers.removeprefix(f"{path}.")
    return path, blocks_of(module.get_submodule(path), list_path, path)


def _sequence_in(path: str, sequence: nn.Sequential) -> tuple[str, Layers]:
    if type(sequence).forward is not nn.Sequential.forward:
        raise ValueError(
            f"Name a plain `nn.Sequential` with `layers=`: {path!r} is a {type(sequence).__name__}"
            " with a forward of its own, so its layers cannot be run one after the other."
        )
    return path, layers_in(sequence)


def _refuse_outside(module: nn.Module, path: str) -> NoReturn:
    name = next(iter(trainable_outside(module, path)))
    raise ValueError(
        f"Make {name!r} part of {path!r}, like `nn.Sequential(first, *layers)`, or freeze it with"
        f" `requires_grad_(False)`, or, if the steps use it behind {path!r} only, pass"
        f" layers={path!r}: the trainable parameter {name!r} is outside of the pipelined module."
    )


def _get(module: nn.Module, path: str) -> tuple[str, nn.Sequential]:
    parts = dict(module.named_modules(remove_duplicate=False))
    found = parts.get(path)
    if isinstance(found, nn.Sequential):
        return path, found
    what = "no path of a submodule" if found is None else f"a {type(found).__name__}"
    raise ValueError(
        "Leave out `layers=`, or name an `nn.Sequential`, whose children are run one after the"
        f" other, or a list of blocks with it: layers={path!r} is {what}. The module has the"
        f" `nn.Sequential`s {[n for n, m in parts.items() if isinstance(m, nn.Sequential)]}."
    )


def _find_trainable(module: nn.Module, is_behind: IsBehind) -> tuple[str, nn.Sequential]:
    trainable = trainable_ids(module)
    holders = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, nn.Sequential) and trainable & parameter_ids(m)
    }
    names = outermost([*holders])
    fitting = [name for name in names if holds_layers(module, name, is_behind)]
    if not fitting and len(names) == 1:
        _refuse_outside(module, names[0])
    if not fitting:
        _refuse_sequences(module, names)
    name = fitting[0]  # there is one, for it holds more than the others
    sequence = holders[name]
    children = list(sequence.named_children())
    while len(children) == 1 and isinstance(children[0][1], nn.Sequential):
        name, sequence = f"{name}.{children[0][0]}", children[0][1]
        children = list(sequence.named_children())
    return name, sequence


def _refuse_sequences(module: nn.Module, names: Sequence[str]) -> NoReturn:
    """Refuses a module in which several sequences, or none, hold trainable parameters."""
    found = f"Several `nn.Sequential`s hold trainable parameters: {names}"
    ways: list[str] = []
    if not names:
        found = "No `nn.Sequential` holds trainable parameters, so no layers are found for stages"
        ways = [
            "build the model as an `nn.Sequential` of layers and assign it to an attribute"
            " (`training_step` stays as it is)"
        ]
    parts = module.named_modules()
    lists = outermost([n for n, m in parts if isinstance(m, nn.ModuleList) and trainable_ids(m)])
    inside = [name for name in lists if "." in name]
    if inside:
        ways.append(f"name the list of its blocks with `layers=`, one of {inside}")
    elif lists:
        ways.append(
            f"put the model into a module of its own, whose forward runs the blocks of {lists[0]!r}"
            f" in order, and name it with `layers='model.{lists[0]}'`"
        )
    if names:
        ways.append(
            "make one `nn.Sequential` of all layers, like `nn.Sequential(*encoder, *head)`, or name"
            " the one to cut with `layers=`, if the steps use the others behind it"
        )
    said = ", or ".join(ways)
    raise ValueError(f"{said[0].upper()}{said[1:]}. {found}.")


def choose_partition(
    layers: Layers, partition: str | Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Returns the number of layers of each stage; ``"profile"`` begins as ``"parameters"``.

    Raises:
        ValueError: The partition does not fit the layers or the stages.
    """
    num_layers = len(layers)
    if num_layers < num_stages:
        raise ValueError(
            f"Use fewer devices, for no more stages than {num_layers}, or layers='trace', which"
            f" cuts inside of blocks too: num_stages={num_stages} is more than the {num_layers}"
            " layers of the pipelined module."
        )
    if partition == "uniform":
        return tuple(uniform_partition(num_layers, num_stages))
    if partition in ("parameters", "profile"):
        costs = [0.0] * num_layers
        for part in layers.parts():
            costs[part.layer_index] += count_parameters(structure_of(part.module))
        for placed in layers.placed:
            costs[layers.layer_of(placed)] += placed.num_elements
        return tuple(partition_layers(costs, num_stages))
    assert not isinstance(partition, str)
    counts = tuple(partition)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"partition={list(counts)} must give each of the {num_stages} stages at least one layer"
            f" and sum to the {num_layers} layers of the pipelined module, but has {len(counts)}"
            f" entries that sum to {sum(counts)}."
        )
    return counts


def refuse_places_outside(module: nn.Module, path: str, layers: Layers) -> None:
    """Refuses a parameter of a layer that has another name outside of the pipelined module.

    Stages without the layer would keep that parameter at its initial value.
    """
    inside = {id(p): name for placed in layers.placed for name, p in placed.parameters().items()}
    placed_names = set[str]().union(*(placed.names for placed in layers.placed))
    for part in layers.parts():
        named = part.module.named_parameters()
        inside |= {id(p): dotted(path, part.name, name) for name, p in named}
    every = module.named_modules(remove_duplicate=False)
    places = [name for name, found in every if found is layers.module] if path else []
    prefixes = tuple(f"{name}." for name in places or (part.name for part in layers.parts()))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        is_there = name in placed_names or name.startswith(prefixes)
        if id(parameter) in inside and not is_there:
            raise ValueError(
                f"The parameter {inside[id(parameter)]!r} is also {name!r}, outside of the"
                f" pipelined module {path!r}, where stages without its layer could not train it."
                " Leave that attribute out. To use a parameter twice, give it to two layers of the"
                " pipelined module; their gradients are summed."
            )


def refuse_ties(ties: Sequence[Tie], reason: str) -> None:
    """Refuses ties; the reason, a sentence, says what to do instead."""
    if ties:
        raise ValueError(
            f"The parameters {ties[0]} are tied. {reason} Or put both layers on one stage with"
            " `partition=` (`layers_per_stage` in a plain loop), or untie them."
        )

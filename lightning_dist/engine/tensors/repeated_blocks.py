"""Finds the block that a model repeats, as a reader of its code would.

A block is a class with two or more outermost instances side by side in an ``nn.Sequential`` or an
``nn.ModuleList``. Side by side as attributes are two towers, each a whole model. What an
``nn.ModuleDict`` holds is chosen by key, and experts inside of a block by the data, but a unit must
run on all ranks or on none. Of three kinds the first that holds half of what any holds is taken:
classes made of other modules, plain ``nn.Sequential`` objects, layers. A class of which all
instances are no larger than the largest block costs no more memory if it is left in the root.
Instances of a chosen block class that stand alone, such as a stage of one block, are taken as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import nn

from lightning_dist.engine.tensors.module_tree import (
    count_parameters,
    is_composite,
    original_class,
    qualified_name,
    shardable_modules,
)

Kind = Callable[[nn.Module], bool]


def _is_sequential(module: nn.Module) -> bool:
    return original_class(module) is nn.Sequential


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def repeated_blocks(root: nn.Module) -> list[str]:
    """Returns the dotted names of a model's blocks, none inside another; empty if none repeats."""
    names = {module: name for name, module in shardable_modules(root).items()}
    kinds = (is_composite, _is_sequential, _is_layer)
    found = [_blocks_of_kind(root, set(names), kind) for kind in kinds]
    sizes = [sum(map(count_parameters, blocks)) for blocks in found]
    preferred = next(i for i, size in enumerate(sizes) if 2 * size >= max(sizes))
    return [names[block] for block in found[preferred]]


def _blocks_of_kind(root: nn.Module, shardable: set[nn.Module], kind: Kind) -> list[nn.Module]:
    blocks = list(dict.fromkeys(_side_by_side(root, shardable, kind)))
    if kind is is_composite:
        classes = {_class_of(block) for block in blocks}
        blocks = list(dict.fromkeys(_outermost(root, shardable, classes)))
    totals: dict[str, int] = defaultdict(int)
    for block in blocks:
        totals[_class_of(block)] += count_parameters(block)
    largest = max(map(count_parameters, blocks), default=0)
    return [block for block in blocks if totals[_class_of(block)] > largest]


def _side_by_side(module: nn.Module, shardable: set[nn.Module], kind: Kind) -> Iterator[nn.Module]:
    groups: dict[str, list[nn.Module]] = defaultdict(list)
    if isinstance(module, nn.Sequential | nn.ModuleList):
        for child in module.children():
            if child in shardable and kind(child):
                groups[_class_of(child)].append(child)
    members = {child for group in groups.values() if len(group) > 1 for child in group}
    for child in module.children():
        if child in members:
            yield child
        else:
            yield from _side_by_side(child, shardable, kind)


def _outermost(
    module: nn.Module, shardable: set[nn.Module], classes: set[str]
) -> Iterator[nn.Module]:
    for child in module.children():
        if child in shardable and _class_of(child) in classes:
            yield child
        else:
            yield from _outermost(child, shardable, classes)


def _class_of(module: nn.Module) -> str:
    # By name: torch's parametrizations make a class of their own for each module.
    return qualified_name(original_class(module))

"""A model as a tree of modules, as FSDP2 divides it into units.

``fully_shard`` is applied from the inside out, and each call takes the parameters that no earlier
call has taken. So three things must be known before a model is sharded: the modules that can be a
unit, their order, and the parameters that two units would take. A module or a parameter may have
several names in a model; here each counts once, under the first name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.tensors.tree import flatten, unflatten

Chain = tuple[str, ...]


def original_class(module: nn.Module) -> type:
    """Returns the class that the user has written, of which ``fully_shard`` derives another one."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def qualified_name(cls: type) -> str:
    """Returns a class's import path."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_composite(module: nn.Module) -> bool:
    """Returns whether a module has children and is no plain ``nn.Sequential``."""
    return original_class(module) is not nn.Sequential and any(True for _ in module.children())


def dotted(*names: str) -> str:
    """Joins names to a dotted one; empty names, such as that of the root, are left out."""
    return ".".join(filter(None, names))


def outermost(names: Collection[str]) -> list[str]:
    """Lists the names of modules that are inside of no other one."""
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


def innermost(names: Collection[str]) -> list[str]:
    """Lists the names of modules that have no other one inside."""
    return [n for n in names if not any(other.startswith(f"{n}.") for other in names)]


def count_parameters(module: nn.Module) -> int:
    """Counts the elements of a module's parameters, shared ones once; a DTensor's are global."""
    return sum(parameter.numel() for parameter in module.parameters())


def set_attribute(root: nn.Module, name: str, value: object) -> None:
    """Sets the module, parameter or buffer of a dotted name in a model."""
    path, _, attribute = name.rpartition(".")
    setattr(root.get_submodule(path), attribute, value)


def place_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns the dict with the parameter or buffer of a dotted name in a model, and its key there.

    For changes not by ``setattr``, which a class may have changed.
    """
    path, _, key = name.rpartition(".")
    owner = root.get_submodule(path)
    held: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
    return held, key


def map_other_tensors(root: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces tensors of a module and those inside it that are neither parameters nor buffers.

    Args:
        root: The module. Its attributes may hold tensors in containers, as a metric's states are.
        function: Returns a tensor in the place of another, or the same one.
    """
    for module in root.modules():
        registered = (module._parameters, module._buffers, module._modules)
        for name, value in vars(module).items():
            if any(value is those for those in registered):
                continue
            tensors, skeleton = flatten(value)
            others = [function(tensor) for tensor in tensors]
            if any(other is not tensor for other, tensor in zip(others, tensors, strict=True)):
                vars(module)[name] = unflatten(others, skeleton)


def bottom_up(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walks over the first names and modules of a model, each after those inside it."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for key, child in module.named_children():
            if child not in seen:
                yield from visit(dotted(name, key), child)
        yield name, module

    return visit("", root)


def shardable_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that can be a unit: below the root, with parameters and a forward.

    A unit's parameters are whole only from the beginning to the end of the unit's forward. A module
    without a forward (``nn.ModuleList``, or a bare ``nn.Module`` as a name space) is never called.
    ``nn.MultiheadAttention`` reads the weight of its output projection without calling it.

    Returns:
        Modules by their first dotted name, inner ones before the outer ones.
    """
    opaque = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    inside = {part for module in opaque for part in module.modules() if part is not module}
    return {
        name: module
        for name, module in bottom_up(root)
        if module is not root
        and module not in inside
        and original_class(module).forward is not nn.Module.forward  # type: ignore[attr-defined]
        and any(True for _ in module.parameters())
    }


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """The uses of a parameter.

    Attributes:
        parameter: The parameter.
        names: The parameter's first dotted name by the units around a use: a chain from the root
            (``""``) to the innermost unit. A shared parameter or module has several chains.
    """

    parameter: nn.Parameter
    names: dict[Chain, str]

    @property
    def home(self) -> str:
        """The innermost unit around all uses."""
        first, *others = self.names
        return [unit for unit in first if all(unit in chain for chain in others)][-1]

    @property
    def between(self) -> list[str]:
        """The units that stand between the home and a use; none if the unit can be sharded."""
        return [unit for chain in self.names for unit in chain[chain.index(self.home) + 1 :]]


def parameter_uses(root: nn.Module, units: Collection[str]) -> list[ParameterUse]:
    """Returns the uses of each parameter by units, in the order of ``root.parameters()``."""
    unit_names = {root.get_submodule(name): name for name in ("", *units)}
    names: dict[nn.Parameter, dict[Chain, str]] = {p: {} for p in root.parameters()}
    seen: set[tuple[nn.Module, Chain]] = set()

    def visit(path: str, module: nn.Module, chain: Chain) -> None:
        if module in unit_names:
            chain = (*chain, unit_names[module])
        if (module, chain) in seen:
            return
        seen.add((module, chain))
        for key, parameter in module.named_parameters(recurse=False):
            names[parameter].setdefault(chain, dotted(path, key))
        for key, child in module.named_children():
            visit(dotted(path, key), child, chain)

    visit("", root, ())
    return [ParameterUse(parameter, by_chain) for parameter, by_chain in names.items()]


def split_parameters(root: nn.Module, units: Collection[str]) -> list[ParameterUse]:
    """Returns the shared parameters that two units would both shard.

    ``fully_shard`` does not keep such a tie: torch 2.13 raises an error in the first forward.
    """
    return [use for use in parameter_uses(root, units) if use.between]


def without_splits(root: nn.Module, units: Collection[str]) -> list[str]:
    """Returns the units but those that would split a shared parameter.

    Such a parameter then belongs to the unit around all its uses.
    """
    dropped = {unit for use in split_parameters(root, units) for unit in use.between}
    return [unit for unit in units if unit not in dropped]

"""Wrap policies: they choose the modules that become units of FSDP2, each gathered as a whole.

With too few units, most of the model is whole at the same time. With too many, each collective is
too small to be worth its start. The choice is the user's, so it is data: a policy is a small frozen
object that prints as it is typed and can be written in YAML. A policy only chooses; order,
repetitions and shared parameters are handled in the base class. Policies are combined::

    AnyOf(EachBlock(), With(ByClass(["RMSNorm"]), keep_fp32=True))
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from lightning_dist.engine.common.names import check_count, fits, nearest, shorten, with_stars
from lightning_dist.engine.tensors.module_tree import (
    count_parameters,
    original_class,
    qualified_name,
    shardable_modules,
    split_parameters,
    without_splits,
)
from lightning_dist.engine.tensors.repeated_blocks import repeated_blocks

_FACE = "lightning_dist.wrap"  # where users find the policies


@dataclass(frozen=True, slots=True)
class Unit:
    """A module to shard as one.

    Attributes:
        name: Dotted name of the module.
        reshard_after_forward: As for ``fully_shard``; None for the strategy's default.
        keep_fp32: Whether the module stays in fp32 under mixed precision.
    """

    name: str
    reshard_after_forward: bool | int | None = None
    keep_fp32: bool = False

    def or_else(self, other: Unit) -> Unit:
        """Returns this unit with its open options filled from a later choice of the module."""
        reshard = self.reshard_after_forward
        return replace(
            self,
            reshard_after_forward=other.reshard_after_forward if reshard is None else reshard,
            keep_fp32=self.keep_fp32 or other.keep_fp32,
        )


class WrapPolicy(ABC):
    """Selects the modules that become units; a subclass implements :meth:`choose`."""

    @property
    def is_manual(self) -> bool:
        """Whether the module has sharded itself, and must not be sharded again."""
        return False

    @abstractmethod
    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns units among ``shardable_modules(module)``, in any order.

        Raises:
            ValueError: The policy matches no module.
        """

    def select(self, module: nn.Module) -> list[Unit]:
        """Returns the units that the policy chooses, arranged."""
        return self.arrange(module, self.choose(module))

    def arrange(self, module: nn.Module, chosen_units: Iterable[Unit]) -> list[Unit]:
        """Returns chosen units in the order in which to shard them.

        A module that is chosen twice is one unit. If the two choices have different options the
        first one counts; an option that one choice leaves open is taken from the other.

        Args:
            module: The model; it is not changed.
            chosen_units: The policy's units, maybe with others.

        Returns:
            Units, inner modules before outer ones, never the root; a shared one by its first name.

        Raises:
            ValueError: The policy matches no module, or puts a shared parameter into two units.
        """
        chosen: dict[str, Unit] = {}
        for unit in chosen_units:
            chosen[unit.name] = chosen[unit.name].or_else(unit) if unit.name in chosen else unit
        shardable = shardable_modules(module)
        for name in chosen:
            if name not in shardable:
                raise ValueError(
                    f"{self} has chosen {name!r}, which is no module below the root that has"
                    " parameters and a forward of its own."
                )
        units = [chosen[name] for name in shardable if name in chosen]
        for use in split_parameters(module, [unit.name for unit in units]):
            places = [f"{name!r} in {chain[-1] or 'the root'}" for chain, name in use.names.items()]
            raise ValueError(
                f"{self} puts the uses of one shared parameter into several units:"
                f" {', '.join(places)}. FSDP would shard it twice. Select none of"
                f" {list(dict.fromkeys(use.between))}; it then belongs to"
                f" {use.home or 'the root'}."
            )
        return units


@dataclass(frozen=True)
class EachBlock(WrapPolicy):
    """Each instance of the block that the model repeats; ``wrap="auto"``.

    :mod:`.tensors.repeated_blocks` defines a block. A model that repeats nothing has no units but
    the root. Blocks that share a parameter with a module outside of them are left to the root.

    Each block must run in each step on all ranks. If that is not so (a mixture of experts without a
    block around), name the modules with another policy.
    """

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the blocks as units; none for a model that repeats nothing."""
        return [Unit(name) for name in without_splits(module, repeated_blocks(module))]


@dataclass(frozen=True)
class ByClass(WrapPolicy):
    """All modules of some classes and of their subclasses.

    Attributes:
        names: Class names such as ``Block``, or import paths such as ``torch.nn.Linear``. Each name
            must match a module.
    """

    names: list[str]

    def __post_init__(self) -> None:
        """Checks the names."""
        _check_list("names", self.names)
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"names={self.names!r} must be names, such as 'torch.nn.Linear'.")

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the instances of the classes as units."""
        shardable = shardable_modules(module)
        available = Counter(original_class(part).__name__ for part in shardable.values())
        units = []
        for wanted in self.names:
            found = [name for name, part in shardable.items() if _is_a(part, wanted)]
            if not found:
                shown = [f"{name} x{count}" for name, count in available.most_common()]
                raise ValueError(_no_match(f"The class {wanted!r}", wanted, available, shown))
            units += [Unit(name) for name in found]
        return units


@dataclass(frozen=True)
class ByName(WrapPolicy):
    """All modules whose dotted name fits a pattern.

    Attributes:
        patterns: As for :mod:`fnmatch`, part by part, as in torch's ``parallelize_module``: ``*``
            stands for one part of a name, so ``layers.*`` is each layer, and nothing inside a
            layer. Each pattern must match a module.
    """

    patterns: list[str]

    def __post_init__(self) -> None:
        """Checks the patterns."""
        _check_list("patterns", self.patterns)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the matching modules as units."""
        first_names = {part: name for name, part in shardable_modules(module).items()}
        everywhere = {
            name: first_names[part]
            for name, part in module.named_modules(remove_duplicate=False)
            if part in first_names
        }
        units = []
        for pattern in self.patterns:
            found = [first for name, first in everywhere.items() if fits(name, pattern)]
            if not found:
                shown = list(dict.fromkeys(with_stars(name) for name in everywhere))
                near = [*shown, *everywhere]
                raise ValueError(_no_match(f"The pattern {pattern!r}", pattern, near, shown))
            units += [Unit(name) for name in found]
        return units


@dataclass(frozen=True)
class BySize(WrapPolicy):
    """The smallest modules with enough parameters, as torch's ``size_based_auto_wrap_policy``.

    Modules are counted from the inside out, and a unit's parameters do not count again for the
    modules around it. A unit that would split a shared parameter is left out.

    Attributes:
        min_parameters: Number of parameter elements from which a module is a unit.
    """

    min_parameters: int

    def __post_init__(self) -> None:
        """Checks the size."""
        check_count("min_parameters", self.min_parameters)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the matching modules as units."""
        taken: set[nn.Parameter] = set()
        found = []
        sizes: Counter[str] = Counter()
        for name, part in shardable_modules(module).items():
            sizes[name] = count_parameters(part)
            rest = [p for p in part.parameters() if p not in taken]
            if sum(p.numel() for p in rest) >= self.min_parameters:
                found.append(name)
                taken.update(rest)
        if not found:
            shown = [f"{name} {size:,}" for name, size in sizes.most_common()]
            raise ValueError(
                f"No module below the root has min_parameters={self.min_parameters:,}. The largest"
                f" are: {shorten(shown)}."
            )
        return [Unit(name) for name in without_splits(module, found)]


@dataclass(frozen=True)
class Manual(WrapPolicy):
    """No units, for modules whose ``configure_model`` calls ``fully_shard`` itself."""

    @property
    def is_manual(self) -> bool:
        """True, because the module has sharded itself."""
        return True

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns no units."""
        return []


@dataclass(frozen=True, init=False)
class AnyOf(WrapPolicy):
    """The units of several policies; :meth:`WrapPolicy.select` merges units that two select.

    Args:
        policies: The policies as a list, as in YAML, or the first policy.
        others: The policies after the first one.

    Attributes:
        policies: All policies; each must select a module.
    """

    policies: list[WrapPolicy]

    def __init__(self, policies: list[WrapPolicy] | WrapPolicy, *others: WrapPolicy) -> None:
        first = [policies] if isinstance(policies, WrapPolicy) else policies
        _check_list("policies", first)
        for policy in (together := [*first, *others]):
            _check_not_manual(policy)
        object.__setattr__(self, "policies", together)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the units of each policy, in the policies' order."""
        return [unit for policy in self.policies for unit in policy.choose(module)]


@dataclass(frozen=True)
class With(WrapPolicy):
    """The units of another policy, with options of their own.

    Attributes:
        policy: The policy that selects the modules.
        reshard_after_forward: True shards again after the forward, False keeps the parameters whole
            until the backward, a number shards them over so many ranks meanwhile; None keeps the
            default.
        keep_fp32: Leave the modules out of mixed precision's cast.
    """

    policy: WrapPolicy
    reshard_after_forward: bool | int | None = None
    keep_fp32: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        _check_not_manual(self.policy)
        ranks = self.reshard_after_forward
        if ranks is not None and not isinstance(ranks, bool):
            check_count("reshard_after_forward", ranks, at_least=2, instead="True, False")

    def choose(self, module: nn.Module) -> list[Unit]:
        """Returns the policy's units; these options override the policy's own."""
        return [
            Unit(unit.name, self.reshard_after_forward, self.keep_fp32).or_else(unit)
            for unit in self.policy.choose(module)
        ]


def parse_policy(wrap: str | WrapPolicy) -> WrapPolicy:
    """Returns the policy of an argument ``wrap``: ``"auto"``, ``"manual"`` or a policy."""
    if isinstance(wrap, WrapPolicy):
        return wrap
    policies: dict[object, WrapPolicy] = {"auto": EachBlock(), "manual": Manual()}
    for policy in list(policies.values()):  # as a command line writes what takes no arguments
        name = type(policy).__name__
        policies |= {name: policy, f"{_FACE}.{name}": policy, f"{__name__}.{name}": policy}
    if isinstance(wrap, str) and wrap in policies:
        return policies[wrap]
    classes = [cls.__name__ for cls in (EachBlock, ByClass, ByName, BySize, Manual, AnyOf, With)]
    others = ["auto", "manual", *classes]
    with_arguments = str(wrap).rpartition(".")[2] in classes
    advice = " It needs its arguments." if with_arguments else nearest(str(wrap), others)
    raise ValueError(
        f"wrap={wrap!r} is unknown.{advice} Use 'auto', 'manual' or a policy of {_FACE}:"
        f" {', '.join(classes)}."
    )


def _is_a(module: nn.Module, wanted: str) -> bool:
    path, _, name = wanted.rpartition(".")
    # A public path is often not the defining one: torch.nn.Linear is torch.nn.modules.linear's.
    public = getattr(sys.modules.get(path), name, None)
    return any(
        wanted in (cls.__name__, qualified_name(cls)) or cls is public
        for cls in original_class(module).__mro__
    )


def _check_list(field: str, values: object) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{field}={values!r} must be a list with at least one entry.")


def _check_not_manual(policy: WrapPolicy) -> None:
    if not isinstance(policy, WrapPolicy):
        raise ValueError(f"{policy!r} is no wrap policy. Use one of lightning_dist.wrap.")
    if policy.is_manual:
        raise ValueError(f"{policy} selects nothing and cannot be combined. Use it alone.")


def _no_match(what: str, wanted: str, near: Iterable[str], shown: list[str]) -> str:
    return (
        f"{what} fits no module that can be a unit (below the root, with parameters and a forward)."
        f"{nearest(wanted, near)} There are: {shorten(shown)}."
    )

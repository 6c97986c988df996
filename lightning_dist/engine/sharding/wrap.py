"""Wrap policies: which modules become units of FSDP2, each gathered and sharded as a whole.

Too few units, and most of the model is whole at the same time; too many, and each collective is too
small to be worth its start. The cut is a choice of the user's, so it is data: a policy is a small
frozen object that prints as it is typed, can be written in YAML, and selects from a module without
touching it. Whoever shards applies ``fully_shard`` to the selected modules in the given order, and
to the root at the end.

Policies are combined with :class:`AnyOf`, and :class:`With` says how the modules of one are to be
treated::

    AnyOf(EachBlock(), With(ByClass(["RMSNorm"]), keep_fp32=True))

What cannot be sharded is refused here, from the module alone and so alike on all ranks: a name that
fits nothing, and a cut between two uses of a shared parameter.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from lightning_dist.engine.common.names import check_count, fits, nearest, shorten, with_stars
from lightning_dist.engine.sharding.wrap_policy import Unit, WrapPolicy
from lightning_dist.engine.tensors.module_tree import (
    count_parameters,
    original_class,
    qualified_name,
    shardable_modules,
    without_splits,
)
from lightning_dist.engine.tensors.repeated_blocks import repeated_blocks

__all__ = [
    "AnyOf",
    "ByClass",
    "ByName",
    "BySize",
    "EachBlock",
    "Manual",
    "Unit",
    "With",
    "WrapPolicy",
    "parse_policy",
]

_FACE = "lightning_dist.wrap"  # where users find the policies


@dataclass(frozen=True)
class EachBlock(WrapPolicy):
    """Each instance of the block that the model repeats; ``wrap="auto"``.

    The block is found as :mod:`.tensors.repeated_blocks` argues: a class with two or more
    instances side by side in an ``nn.Sequential`` or ``nn.ModuleList``, outermost, with enough
    parameters to be worth it; layers, such as the ``nn.Linear`` of an MLP, only where nothing
    larger is repeated. A model that repeats nothing has no units but the root. Blocks that share a
    parameter with something outside of them are left to the root.

    Each block is taken to run in each step on all ranks. Where that is not so (a mixture of experts
    without a block around), name the modules with another policy.
    """

    def choose(self, module: nn.Module) -> list[Unit]:
        """Finds the blocks; none for a model that repeats nothing."""
        return [Unit(name) for name in without_splits(module, repeated_blocks(module))]


@dataclass(frozen=True)
class ByClass(WrapPolicy):
    """All modules of some classes and of their subclasses.

    Attributes:
        names: Class names such as ``Block``, or import paths such as ``torch.nn.Linear``. Each must
            fit a module.
    """

    names: list[str]

    def __post_init__(self) -> None:
        """Checks the names."""
        _check_list("names", self.names)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Finds the instances."""
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
            stands for one part of a name, so ``layers.*`` is each layer, and nothing inside one.
            Each must fit a module.
    """

    patterns: list[str]

    def __post_init__(self) -> None:
        """Checks the patterns."""
        _check_list("patterns", self.patterns)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Finds the modules."""
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

    From the inside out, and the parameters of a unit do not count again for what is around it. A
    unit that would split a shared parameter is left out.

    Attributes:
        min_parameters: Elements that make a unit.
    """

    min_parameters: int

    def __post_init__(self) -> None:
        """Checks the size."""
        check_count("min_parameters", self.min_parameters)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Finds the modules."""
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
    """The module's ``configure_model`` has called ``fully_shard`` itself; selects nothing."""

    @property
    def is_manual(self) -> bool:
        """True."""
        return True

    def choose(self, module: nn.Module) -> list[Unit]:
        """Chooses nothing."""
        return []


@dataclass(frozen=True, init=False)
class AnyOf(WrapPolicy):
    """What any of some policies selects; see :meth:`WrapPolicy.select` for what two select.

    Args:
        policies: The policies as a list, as in YAML, or the first of them.
        others: The others.

    Attributes:
        policies: Each must select something.
    """

    policies: list[WrapPolicy]

    def __init__(self, policies: list[WrapPolicy] | WrapPolicy, *others: WrapPolicy) -> None:
        first = [policies] if isinstance(policies, WrapPolicy) else policies
        _check_list("policies", first)
        for policy in (together := [*first, *others]):
            _check_not_manual(policy)
        object.__setattr__(self, "policies", together)

    def choose(self, module: nn.Module) -> list[Unit]:
        """Chooses what each of the policies does, in their order."""
        return [unit for policy in self.policies for unit in policy.choose(module)]


@dataclass(frozen=True)
class With(WrapPolicy):
    """What another policy selects, treated in its own way.

    Attributes:
        policy: Selects the modules.
        reshard_after_forward: True shards again after the forward, False keeps the parameters whole
            until the backward, a number shards them over so many ranks meanwhile; None says nothing
            of it.
        keep_fp32: Leaves the modules out of mixed precision's cast.
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
        """Chooses what the policy does, with these options before its own."""
        return [
            Unit(unit.name, self.reshard_after_forward, self.keep_fp32).or_else(unit)
            for unit in self.policy.choose(module)
        ]


def parse_policy(wrap: str | WrapPolicy) -> WrapPolicy:
    """Reads a strategy's argument.

    Args:
        wrap: ``"auto"``, ``"manual"`` or a policy.

    Raises:
        ValueError: It is something else.
    """
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

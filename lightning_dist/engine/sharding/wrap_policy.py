"""The base class of wrap policies: it returns valid units, in the order in which to shard them.

A policy only chooses. Order, repetitions and shared parameters are handled here once for all
policies, so that a user's own policy is one method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import nn

from lightning_dist.engine.tensors.module_tree import shardable_modules, split_parameters


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
        """Returns this unit with its open options filled from another selection.

        Args:
            other: A later selection of the same module.
        """
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
        """Returns the units in the order in which to shard them.

        A module that is chosen twice is one unit. If the two choices have different options the
        first one counts; an option that one choice leaves open is taken from the other.

        Args:
            module: The model; it is not changed.

        Returns:
            Units, inner modules before outer ones, never the root. A shared module has its first
            name.

        Raises:
            ValueError: The policy matches no module, or puts a shared parameter into two units.
        """
        chosen: dict[str, Unit] = {}
        for unit in self.choose(module):
            chosen[unit.name] = chosen[unit.name].or_else(unit) if unit.name in chosen else unit
        shardable = shardable_modules(module)
        for name in chosen:
            if name not in shardable:
                raise ValueError(
                    f"{self} has chosen {name!r}, which is no module below the root that has"
                    " parameters and a forward of its own."
                )
        units = [chosen[name] for name in shardable if name in chosen]
        self._check_shared(module, units)
        return units

    def _check_shared(self, module: nn.Module, units: list[Unit]) -> None:
        for use in split_parameters(module, [unit.name for unit in units]):
            places = [f"{name!r} in {chain[-1] or 'the root'}" for chain, name in use.names.items()]
            raise ValueError(
                f"{self} puts the uses of one shared parameter into several units:"
                f" {', '.join(places)}. FSDP would shard it twice. Select none of"
                f" {list(dict.fromkeys(use.between))}; it then belongs to"
                f" {use.home or 'the root'}."
            )

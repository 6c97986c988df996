"""Steps that call backward and update by themselves, on a sharded module.

FSDP2 gathers the root's own parameters for the root's forward, and shards them again after the
backward. With manual optimization a step has several forwards, backwards and updates. Such a step
is not run as the root's forward, and the root holds no parameters. The modules that the step calls
are units, each gathered for its own forward and its own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.sharding.fully_shard import is_indivisible, reshard
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.tensors.module_tree import (
    outermost,
    parameter_uses,
    shardable_modules,
    without_splits,
)


class ManualSteps:
    """Runs steps of manual optimization.

    Args:
        root: The sharded root, which runs the function that it is called with.
        keep: Copies back what was written into gathered weights.
    """

    def __init__(self, root: nn.Module, keep: Callable[[], None]) -> None:
        self._root, self._keep = root, keep

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns the context manager for a training step."""
        self._root(lambda: None)  # the first module that FSDP2 sees is its root
        try:
            yield
            self._keep()
        finally:
            reshard(self._root)

    def run_update(self, apply: Callable[[], object]) -> object:
        """Runs an update, and frees the weights that were gathered before it."""
        self._keep()
        try:
            return apply()
        finally:
            reshard(self._root)


def called_units(module: nn.Module, chosen: Sequence[Unit]) -> list[Unit]:
    """Returns a unit for each module that a step calls, beside those that a policy has chosen."""
    called = outermost(shardable_modules(module))
    names = {*called, *(unit.name for unit in chosen)}
    return [Unit(name) for name in without_splits(module, names) if name in called]


def check_called(module: nn.Module, units: Sequence[str]) -> None:
    """Checks that each parameter belongs to a module that a step calls, so to one of the units."""
    uses = [u for u in parameter_uses(module, units) if not is_indivisible(u.parameter)]
    left = [name for use in uses if not use.home for name in use.names.values()]
    if left:
        raise ValueError(
            f"With manual optimization parameters are gathered where modules are called, and"
            f" {shorten(left)} belong to no module of the LightningModule, or to several. Put each"
            " into one module of its own, or use DDPStrategy."
        )

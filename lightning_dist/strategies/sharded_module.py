"""The user's module under FSDP2, and what a strategy does with it.

The root of the sharding is not the user's module but a :class:`StepModule` around it: FSDP2 hooks
into a forward, and a Lightning step is none. So the user's module stays of the user's class, and
parameters that belong to no unit are gathered for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_dist.activation_checkpointing import checkpoint_activations
from lightning_dist.sharding import ShardingOptions, recover, reshard, shard
from lightning_dist.strategies.step_module import StepModule
from lightning_dist.wrap import ByClass, Unit, WrapPolicy
from lightning_dist.wrap_summary import WrapSummary, describe


@dataclass(frozen=True)
class UnitOptions:
    """What is done to the units before they are sharded.

    Attributes:
        activation_checkpointing: As given to the strategy.
        compile: As given to the strategy.
    """

    activation_checkpointing: str | list[str] = "none"
    compile: bool = False


class ShardedModule:
    """A module whose parameters are spread over a mesh.

    Args:
        module: The user's module; changed. Parameters may be on the meta device.
        policy: Chooses the units.
        mesh: One axis to shard over, or replicas and shards.
        sharding: How units are sharded.
        options: What else is done to them.

    Raises:
        ValueError: The policy matches nothing.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        policy: WrapPolicy,
        mesh: DeviceMesh,
        sharding: ShardingOptions,
        options: UnitOptions,
    ) -> None:
        units = _sharded_already(module) if policy.is_manual else policy.select(module)
        self.module = module
        half = sharding.param_dtype
        reshard_by_default = sharding.reshard_after_forward
        self.summary: WrapSummary = describe(
            module,
            units,
            bytes_per_element=None if half is None else half.itemsize,
            reshard_after_forward=True if reshard_by_default is None else reshard_by_default,
        )
        _prepare(module, units, options)
        self._root = StepModule(module)
        new = [] if policy.is_manual else units
        self._units: FSDPModule = shard(self._root, module, new, mesh, sharding)
        self._was_entered = False

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step whose result will be differentiated.

        Args:
            step: A method of the module.
            args: Of the step.
            kwargs: Of the step.
        """
        return self._root(self._entered(step), *args, **kwargs)

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step without gradients.

        Args:
            step: A method of the module.
            args: Of the step.
            kwargs: Of the step.
        """
        # Gathered parameters made under `inference_mode` could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._root(self._entered(step), *args, **kwargs)
            finally:
                self.reshard()

    def _entered(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._was_entered = True
            return step(*args, **kwargs)

        return entered

    def reshard(self) -> None:
        """Makes the module's parameters the sharded ones, whatever has run last."""
        reshard(self._root)

    def recover(self) -> None:
        """Makes the module's parameters the sharded ones after an exception inside of a step."""
        if self._was_entered:  # until then nothing is gathered, and FSDP2 not set up
            recover(self._root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps the gradients of backwards inside on this rank, whole.

        Yields:
            Nothing.
        """
        self._units.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._units.set_requires_gradient_sync(True)


def _sharded_already(module: nn.Module) -> list[Unit]:
    parts = module.named_modules()
    return [Unit(name) for name, part in parts if name and isinstance(part, FSDPModule)]


def _prepare(module: nn.Module, units: list[Unit], options: UnitOptions) -> None:
    if options.compile:  # first, for the compiler does not see through checkpointing
        for unit in _outermost(module, units) or [module]:
            unit.forward = torch.compile(unit.forward)
    mode = options.activation_checkpointing
    if isinstance(mode, list):
        units = ByClass(mode).select(module)
    elif mode == "none":
        units = []
    checkpoint_activations(_outermost(module, units), keep_products=mode == "selective")


def _outermost(module: nn.Module, units: list[Unit]) -> list[nn.Module]:
    names = [unit.name for unit in units]
    return [
        module.get_submodule(name)
        for name in names
        if not any(name.startswith(f"{other}.") for other in names)
    ]

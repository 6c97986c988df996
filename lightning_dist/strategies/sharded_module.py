"""The user's module with its parameters spread, and what a strategy does with it.

The root of the sharding is not the user's module but a :class:`StepModule` around it: FSDP2 hooks
into a forward, and a Lightning step is none. So the user's module stays of the user's class, and
parameters that belong to no unit are gathered for the whole step. Layers that are spread over
tensor-parallel ranks need no root; their inputs and outputs are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from lightning_dist.activation_checkpointing import checkpoint_activations
from lightning_dist.device_mesh import axis
from lightning_dist.sharding import ShardingOptions, recover, reshard
from lightning_dist.sharding import shard as fully_shard
from lightning_dist.strategies.shard_config import ShardConfig
from lightning_dist.strategies.step_module import StepModule
from lightning_dist.strategies.unit_agreement import UnitAgreement
from lightning_dist.tensor.config import TensorConfig
from lightning_dist.tensor.discovery import find_plan
from lightning_dist.tensor.logits import LogitsApart, joined
from lightning_dist.tensor.plan import resolve_plan
from lightning_dist.tensor.plan_summary import describe_plan
from lightning_dist.tensor.spread import SpreadModule, SpreadOptions
from lightning_dist.tensor.summary import TensorSummary, summarise
from lightning_dist.wrap import ByClass, Unit
from lightning_dist.wrap_summary import WrapSummary, describe


class ShardedModule:
    """A module whose parameters are spread over a mesh.

    The order in which it is composed is the specification: tensor parallelism, compilation,
    activation checkpointing, shards.

    Args:
        module: The user's module; changed. Parameters may be on the meta device.
        mesh: From :func:`~lightning_dist.device_mesh.build_mesh`.
        sharding: How units are sharded.
        shard: What else the user has asked for.
        tensor: How layers are spread, where the mesh has tensor-parallel ranks.
        groups: Gloo groups: of all ranks, and of those that compute a forward together.

    Raises:
        ValueError: A policy or plan matches nothing, or a size cannot be shared out.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: DeviceMesh,
        sharding: ShardingOptions,
        shard: ShardConfig,
        tensor: TensorConfig,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        self.module = module
        self._root = StepModule(module)
        self._was_entered = False
        self._spread = _spread(module, axis(mesh, "tp"), tensor)
        self._has_logits_apart = self._spread is not None and tensor.loss_parallel
        policy = shard.policy
        units = _sharded_already(module) if policy.is_manual else policy.select(module)
        self.summary: WrapSummary = _describe(module, units, sharding)
        _prepare(module, units, shard)
        data_mesh = axis(mesh, "dp_replicate", "dp_shard")
        self._units: FSDPModule | None = None
        if data_mesh is not None:
            new = [] if policy.is_manual else units
            self._units = fully_shard(self._root, module, new, data_mesh, sharding)
        self._agreement = UnitAgreement(
            module,
            [unit.name for unit in units],
            *groups,
            always=shard.find_unused_parameters,
        )

    @property
    def plan(self) -> str:
        """Which layers are spread, in a few lines."""
        return "" if self._spread is None else describe_plan(self.module, self._spread.styles)

    @property
    def tensor_summary(self) -> TensorSummary | None:
        """What this rank holds of each layer, if layers are spread."""
        return None if self._spread is None else summarise(self.module, self._spread.styles)

    def add_gradients(self) -> None:
        """Completes the gradients of which each tensor-parallel rank has a summand, once a step."""
        if self._spread is not None:
            self._spread.add_gradients()

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step whose result will be differentiated.

        Args:
            step: A method of the module.
            args: Of the step.
            kwargs: Of the step.
        """
        return self._run(step, args, kwargs, training=True)

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
                return self._run(step, args, kwargs, training=False)
            finally:
                self.reshard()

    def backward_context(self) -> AbstractContextManager[None]:
        """Gives what the backward of a step's loss runs in."""
        return loss_parallel() if self._has_logits_apart else nullcontext()

    def _run(self, step: Callable[..., Any], args: Any, kwargs: Any, *, training: bool) -> Any:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._was_entered = True
            with self._agreement.step(training=training):
                if not self._has_logits_apart:
                    return step(*args, **kwargs)
                with LogitsApart():
                    return joined(step(*args, **kwargs))

        return self._root(entered, *args, **kwargs)

    def reshard(self) -> None:
        """Makes the module's parameters the sharded ones, whatever has run last."""
        reshard(self._root)

    def recover(self) -> None:
        """Makes the module's parameters the sharded ones after an exception inside of a step."""
        # Until a step was entered nothing is gathered, and FSDP2 not set up.
        if self._was_entered and self._units is not None:
            recover(self._root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps the gradients of backwards inside on this rank, whole.

        Yields:
            Nothing.
        """
        if self._units is None:
            yield
            return
        self._units.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._units.set_requires_gradient_sync(True)


def _sharded_already(module: nn.Module) -> list[Unit]:
    parts = module.named_modules()
    return [Unit(name) for name, part in parts if name and isinstance(part, FSDPModule)]


def _spread(
    module: nn.Module, mesh: DeviceMesh | None, config: TensorConfig
) -> SpreadModule | None:
    if mesh is None:
        return None
    if config.plan == "auto":
        styles = find_plan(module, mesh.size())
    else:
        styles = resolve_plan(module, config.plan)
    return SpreadModule(
        module, styles, mesh, SpreadOptions(config.sequence_parallel, config.loss_parallel)
    )


def _describe(module: nn.Module, units: list[Unit], sharding: ShardingOptions) -> WrapSummary:
    half, reshard_by_default = sharding.param_dtype, sharding.reshard_after_forward
    return describe(
        module,
        units,
        bytes_per_element=None if half is None else half.itemsize,
        reshard_after_forward=True if reshard_by_default is None else reshard_by_default,
    )


def _prepare(module: nn.Module, units: list[Unit], options: ShardConfig) -> None:
    if options.compile:  # first, for the compiler does not see through checkpointing
        for unit in _outermost(module, units) or [module]:
            unit.forward = torch.compile(unit.forward)
    mode = options.activation_checkpointing
    if not isinstance(mode, str):
        units = ByClass(list(mode)).select(module)
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

"""Finds the module to trace, and divides its layers among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.planning.partition import layers_of_stages
from lightning_dist.engine.precision.casts import TracedCasts
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.schedules.family import stages_of_rank
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.find_layers import choose_partition
from lightning_dist.engine.splitting.find_loss_parameters import (
    give_loss_parameters,
    holds_layers,
    not_in_a_forward,
)
from lightning_dist.engine.splitting.layers import WholeStep
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.tracing.example import CallExample
from lightning_dist.engine.splitting.tracing.sequence import TracedLayers, traced_layers


@dataclass(frozen=True)
class TracedSplit(PipelineSplit):
    """One rank's part of a module that was traced."""

    layers: TracedLayers

    @property
    def _own_layers(self) -> list[int]:
        return layers_of_stages(self.layers_per_stage, self.stages)

    def _names_in(self, layers: Sequence[int]) -> set[str]:
        """Returns the names that the tensors of some layers have in the user's module."""
        return {f"{self._prefix}{name}" for name in self.layers.names_in(layers)}

    @property
    def _all_names(self) -> set[str]:
        return self._names_in(range(len(self.layers)))

    @override
    def _whole_layers(self, device: torch.device | None) -> AbstractContextManager[None]:
        return self.layers.away.as_empty(device)

    @override
    def tensors_outside(self, module: nn.Module) -> list[Tensor]:
        inside = self._all_names | self.layers.loss_parameters.names
        named = [*module.named_parameters(), *module.named_buffers()]
        return [tensor for name, tensor in named if name not in inside]

    @override
    def remote_names(self) -> set[str]:
        away, saved = self._all_names - self._names_in(self._own_layers), self.layers.saved.items()
        remote = {self._prefix + key for key, name in saved if self._prefix + name in away}
        return remote | self.layers.loss_parameters.remote_names

    @override
    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        away = self.layers.away.names
        with self.whole():  # a layer may write its tensors by itself, whether it has them or not
            state = module.state_dict()
        for key, name in self.layers.saved.items():
            if name in away:
                state.pop(self._prefix + key, None)
        return state

    @override
    def is_stored_here(self, name: str) -> bool:
        key = name.removeprefix(self._prefix)
        tensor = f"{self._prefix}{self.layers.saved.get(key, key)}"
        if not name.startswith(self._prefix) or tensor not in self._all_names:
            return self.has_last
        return tensor in self._names_in(self._own_layers)


def find_traced_split(
    module: nn.Module,
    config: PipelineConfig,
    num_ranks: int,
    rank: int,
    half: HalfPrecision | None,
    example: CallExample,
) -> PipelineSplit:
    """Traces a module, or takes an earlier trace of it, and returns this rank's part.

    With one stage, nothing is traced: the stage is the whole module. Graphs have the casts of
    ``half`` built in.

    Raises:
        ValueError: The module cannot be traced or cut as configured.
    """
    rank_of_stage = config.rank_of_stage(num_ranks)
    if len(rank_of_stage) == 1:
        step = WholeStep(module)
        return PipelineSplit("", step, (1,), stages=(0,), rank_of_stage=(0,), ties=())
    path = config.layers.partition(":")[2]
    if config.layers in ("auto", "trace"):
        path = _find_trainable(module, example.has_forward)
    try:
        traced = module.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in module.named_children()]
        raise ValueError(
            f"layers='trace:{path}': the module has no submodule of that path. It has {names} and"
            " what is in them."
        ) from None
    casts = None if half is None else TracedCasts(half, path)
    layers = traced_layers(traced)
    if layers is None:
        args, kwargs = example.arguments(module, path, half)
        try:
            layers = TracedLayers(traced, args, kwargs, casts)
        except ValueError as error:
            title = f"layers='trace', {path!r} ({type(traced).__name__}): "
            raise ValueError(f"{title}{error}") from error.__cause__
        give_loss_parameters(module, path, layers)
    elif layers.program.casts != casts:
        raise ValueError(
            f"{path!r} was traced for an earlier run in another precision, which is built into its"
            " graphs. Make the module anew, or use the same MixedPrecision in each run."
        )
    partition = _choose_partition(layers, config, len(rank_of_stage), path)
    return TracedSplit(
        path=path,
        layers=layers,
        layers_per_stage=partition,
        stages=stages_of_rank(rank_of_stage, rank),
        rank_of_stage=rank_of_stage,
        ties=(),  # a layer has all uses of its own
    )


def is_traced(module: nn.Module) -> bool:
    """Returns whether an earlier run has traced the module, or a part of it."""
    return any(traced_layers(part) is not None for part in module.modules())


def _find_trainable(module: nn.Module, has_forward: Callable[[], bool]) -> str:
    """Returns the name of the attribute that holds the trainable parameters."""
    traced = [n for n, child in module.named_children() if traced_layers(child) is not None]
    if traced:  # by an earlier run
        return traced[0]
    if traced_layers(module) is not None:
        return ""
    holders = [
        name
        for name, child in module.named_children()
        if any(p.requires_grad for p in child.parameters())
    ]
    has_own = any(p.requires_grad for p in module.parameters(recurse=False))
    for name in holders:
        is_called = not isinstance(module.get_submodule(name), nn.ModuleList | nn.ModuleDict)
        if is_called and holds_layers(module, name, not_in_a_forward):
            return name
    if has_forward():
        return ""
    raise ValueError(
        f"layers='trace' found trainable parameters in {holders or 'no submodule'}"
        f"{' and in the LightningModule itself' if has_own else ''}, so no one module is there to"
        " be traced. Put them into one module whose forward runs them all, and call that in the"
        " steps; or give the LightningModule a `forward` and call `self(...)`; or name a module"
        " with layers='trace:path', if the steps use the rest behind it."
    )


def _choose_partition(
    layers: TracedLayers, config: PipelineConfig, num_stages: int, path: str
) -> tuple[int, ...]:
    titles, uncut = layers.program.titles, layers.program.uncut
    if len(titles) < num_stages:
        found = (
            f"layers='trace' finds too few layers in {path!r} for {num_stages} stages"
            f" ({', '.join(titles)})"
        )
        if uncut:
            found += f", because {'; '.join(uncut)}: what lies between must be on one stage"
        elif path:  # frozen layers beside it may be cut as well
            found += ". layers='trace:' cuts the whole LightningModule, if it has a forward"
        raise ValueError(f"{found}. Use no more stages than {len(titles)}.")
    try:
        return choose_partition(layers, config.partition, num_stages)
    except ValueError as error:
        raise ValueError(f"{error} The layers of {path!r} begin at {titles}.") from None

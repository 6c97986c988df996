"""The cut of a model into stages: decided on the whole model, then carried out.

All ranks decide alike, since each of them sees the whole model. Between the decision and the cut a
caller may run ``configure_optimizers``, which may read any parameter's value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.planning.partition import stage_of_layers
from lightning_dist.engine.schedules.family import stages_of_rank
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.blocks.blocks import Blocks
from lightning_dist.engine.splitting.blocks.find_blocks import LayersNotFoundError
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import cut, structure_of, whole
from lightning_dist.engine.splitting.find_layers import (
    choose_partition,
    find_layers,
    refuse_places_outside,
    refuse_ties,
)
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.ties import Tie, find_ties

_STATES = {"state_dict", "current_model_state"}  # of checkpoints
_NO_SUM_IN_TIME = (
    "Under schedule={!r} the later stage applies a batch's gradients before the earlier one"
    " has found its own, so no rank could apply their sum without a bubble. Use"
    " schedule='pipedream_2bw', which has the time, or a synchronous one."
)
_NOT_SHARED = (
    "Each rank would train a copy of its own. Sum their gradients with `TiedSums`, and name the"
    " copies to `Pipeline` with `shared=`."
)


@dataclass(frozen=True)
class PipelineSplit:
    """One rank's part of a model.

    Attributes:
        path: Dotted path of the pipelined module.
        layers: Layers of the pipelined module.
        layers_per_stage: The partition.
        stages: This rank's stages.
        rank_of_stage: The rank of each stage, in the pipeline.
        ties: Parameters that several stages use.
    """

    path: str
    layers: Layers
    layers_per_stage: tuple[int, ...]
    stages: tuple[int, ...]
    rank_of_stage: tuple[int, ...]
    ties: tuple[Tie, ...]

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which runs whole steps."""
        return len(self.layers_per_stage) - 1 in self.stages

    @property
    def source(self) -> str:
        """Where the layers come from, for the line at the start of a run."""
        origin = f" ({self.layers.origin})" if self.layers.origin else ""
        return f"{self.path or 'the module'}{origin}"

    @property
    def sequence(self) -> nn.Module:
        """The pipelined module."""
        return self.layers.module

    def keeps(self, name: str) -> bool:
        """Returns whether this rank keeps a module, parameter or buffer of the whole model."""
        stage = self.stage_of(name)
        return stage is None or stage in self.stages

    def stage_of(self, name: str) -> int | None:
        """Returns the stage of a module, parameter or buffer; None outside of the layers."""
        layer = self._layer_of(name)
        return None if layer is None else stage_of_layers(self.layers_per_stage)[layer]

    @property
    def own_names(self) -> list[list[str]]:
        """Names of this rank's layers in the pipelined module, by stage."""
        stages = stage_of_layers(self.layers_per_stage)
        parts = self.layers.parts()
        return [[p.name for p in parts if stages[p.layer_index] == own] for own in self.stages]

    @property
    def ties_within_a_rank(self) -> list[Tie]:
        """The ties of several stages that are on one rank, which may be any rank."""
        return [tie for tie in self.ties if len(tie.ranks(self.rank_of_stage)) < len(tie.names)]

    def is_in_a_layer(self, name: str) -> bool:
        """Returns whether a module of the whole model is in a layer of the pipelined module."""
        return self._layer_of(name) is not None

    def is_beside(self, name: str) -> bool:
        """Returns whether a module is no part of the pipelined one, and does not hold it."""
        inside = [self._prefix] if self.path else [f"{part.name}." for part in self.layers.parts()]
        own = f"{name}."
        return not any(own.startswith(prefix) or prefix.startswith(own) for prefix in inside)

    @property
    def _prefix(self) -> str:
        """What the names of the pipelined module's parts begin with."""
        return f"{self.path}." if self.path else ""

    def _layer_of(self, name: str) -> int | None:
        for placed in self.layers.placed:
            if name in placed.names:
                return self.layers.layer_of(placed)
        for part in self.layers.parts():
            prefix = "".join(f"{step}." for step in (self.path, part.name) if step)
            if f"{name}.".startswith(prefix):
                return part.layer_index
        return None

    def cut(self) -> None:
        """Removes the layers of all other ranks from the model."""
        cut(self.layers, self.layers_per_stage, self.stages)

    @contextmanager
    def whole(self, device: torch.device | None = None) -> Iterator[None]:
        """Returns a context manager with the whole model's structure; see :func:`.cut.whole`."""
        with self._whole_layers(device), self.layers.loss_parameters.as_empty(device):
            yield

    def _whole_layers(self, device: torch.device | None) -> AbstractContextManager[None]:
        return whole(self.sequence, device)

    def pipelined_modules(self, module: nn.Module) -> set[nn.Module]:
        """Returns the pipelined module of a model; if it is the model, those of its layers."""
        if self.sequence is not module:
            return {self.sequence}
        return {part.module for part in self.layers.parts()} - {module}

    def tensors_outside(self, module: nn.Module) -> list[Tensor]:
        """Lists a module's parameters and buffers that no stage has for itself."""
        parts = [part.module for part in self.layers.parts()]
        inside = {id(t) for part in parts for t in (*part.parameters(), *part.buffers())}
        inside |= {id(parameter) for parameter in self.layers.placed_here()}
        return [t for t in (*module.parameters(), *module.buffers()) if id(t) not in inside]

    def remote_names(self) -> set[str]:
        """Returns the entries of the whole model's state dict that other stages hold."""
        stages = stage_of_layers(self.layers_per_stage)
        beside = (placed.remote_names for placed in self.layers.placed)
        return set[str]().union(*beside) | {
            f"{self._prefix}{part.name}.{key}"
            for part in self.layers.parts()
            if stages[part.layer_index] not in self.stages
            for key in structure_of(part.module).state_dict()
        }

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns a module's state dict without the entries that other stages hold."""
        return module.state_dict()

    def share_of(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a checkpoint with the weights that this rank puts into the joint one."""
        states = {key: checkpoint[key] for key in _STATES & checkpoint.keys()}
        own = {k: {n: s[n] for n in s if self.is_stored_here(n)} for k, s in states.items()}
        return {**checkpoint, **own}

    def is_stored_here(self, name: str) -> bool:
        """Returns whether this rank puts an entry of its state dict into checkpoints."""
        # Outside of the layers each rank holds a copy, and only the last stage runs whole steps.
        return self.has_last or self.is_in_a_layer(name)


def find_split(
    module: nn.Module,
    config: PipelineConfig,
    num_ranks: int,
    rank: int,
    *,
    by_forwards: bool = False,
) -> PipelineSplit:
    """Returns a rank's part of a model, which is whole or what an earlier split has left.

    ``by_forwards`` is as for :func:`.find_layers`.

    Raises:
        LayersNotFoundError: ``layers="auto"`` finds none, or fewer blocks than stages.
        ValueError: The model cannot be cut as configured.
    """
    path, layers = find_layers(module, config.layers, by_forwards=by_forwards)
    rank_of_stage = config.rank_of_stage(num_ranks)
    try:
        layers_per_stage = choose_partition(layers, config.partition, len(rank_of_stage))
    except ValueError as error:
        are_found = config.layers == "auto" and isinstance(layers, Blocks)
        if not are_found or len(layers) >= len(rank_of_stage):
            raise
        raise LayersNotFoundError(str(error)) from None  # a trace may cut inside of blocks
    if len(layers_per_stage) > 1:
        refuse_places_outside(module, path, layers)
    ties = find_ties(layers, layers_per_stage)
    if not config.family.update_rule.is_joint:
        refuse_ties(ties, _NO_SUM_IN_TIME.format(config.schedule))
    return PipelineSplit(
        path=path,
        layers=layers,
        layers_per_stage=layers_per_stage,
        stages=stages_of_rank(rank_of_stage, rank),
        rank_of_stage=rank_of_stage,
        ties=ties,
    )


def check_shape(layers: Layers, shape: PipelineShape, shared: Collection[str]) -> None:
    """Checks that layers can be cut so, and that copies of a parameter are kept equal.

    Args:
        layers: The layers, cut or not.
        shape: This rank's part of the pipeline.
        shared: Names of this rank's copies that are kept equal.

    Raises:
        ValueError: The shape has another number of layers, a copy is not among those that are kept
            equal, or the schedule has no time for sums.
    """
    if sum(shape.layers_per_stage) != len(layers):
        raise ValueError(
            f"layers_per_stage={list(shape.layers_per_stage)} is a cut of"
            f" {sum(shape.layers_per_stage)} layers, and there are {len(layers)}."
        )
    homes = shape.rank_of_stage
    ties = [t for t in find_ties(layers, shape.layers_per_stage) if len(t.ranks(homes)) > 1]
    if not shape.family.update_rule.is_joint:
        refuse_ties(ties, _NO_SUM_IN_TIME.format(shape.schedule))
    own = [tie for tie in ties if shape.rank in tie.ranks(homes)]
    refuse_ties([t for t in own if t.name_on(shape.rank, homes) not in shared], _NOT_SHARED)

"""What callbacks see of a strategy: one object, behind a protocol of one method.

A callback asks for it with :func:`view_of`. The ranks of strategies that have none, such as
Lightning's, are taken for replicas. So callbacks know no strategy's class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.repartition import Repartition
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, replicated


class LayerMover(Protocol):
    """Moves layers between the stages of a pipeline while it trains."""

    def check_layers_can_move(self) -> None:
        """Raises ``ValueError`` if layers share parameters."""

    def repartition(self, layers_per_stage: Sequence[int]) -> Repartition:
        """Moves layers between the ranks. Collective: every rank must call it."""


PredictMemory = Callable[[TrainedPart, bool], RankMemory | None]
"""Takes this rank's part and whether gradients accumulate; returns None without a formula."""


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a run.

    Attributes:
        mesh: The sizes of the mesh.
        group_of_all: Creates a gloo group of all ranks for a purpose; collective.
        predict_memory: The planner's prediction of this rank's memory.
        has_stages: Whether the model is cut into stages.
        pipeline: This rank's stages; None without stages, and before the run is set up.
        layers: Moves layers between stages; None if they cannot move.
        local_steps: Most optimizer steps in which replicas differ from each other.
    """

    mesh: MeshShape
    group_of_all: Callable[[str], dist.ProcessGroup]
    predict_memory: PredictMemory
    has_stages: bool = False
    pipeline: Pipeline | None = None
    layers: LayerMover | None = None
    local_steps: int = 0


@runtime_checkable
class Viewable(Protocol):
    """A strategy that shows its rank to callbacks."""

    def view(self) -> RankView:
        """Returns the view of this rank for callbacks, from ``setup_environment`` on."""


def view_of(trainer: pl.Trainer) -> RankView:
    """Returns a strategy's view of this rank, or that of one replica if the strategy has none."""
    if isinstance(trainer.strategy, Viewable):
        return trainer.strategy.view()
    size = trainer.world_size
    predict = partial(predict_memory_alone, size)
    return RankView(MeshShape(dp_replicate=size), lambda _: dist.new_group(backend="gloo"), predict)


def predict_memory_alone(
    world_size: int, part: TrainedPart, accumulates: bool
) -> RankMemory | None:
    """Predicts the memory of a rank that is alone; None for ranks of which nothing is known."""
    return replicated(part, 1, accumulates=accumulates) if world_size == 1 else None

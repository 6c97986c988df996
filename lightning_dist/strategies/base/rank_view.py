"""What callbacks see of a strategy: one object, behind a protocol of one method.

A callback asks any strategy for its view with :func:`view_of`, and gets None from strategies that
have none, such as Lightning's. So callbacks know no strategy's class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.repartition import Repartition
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart


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
        """Returns what callbacks see of this rank, from ``setup_environment`` on."""


def view_of(strategy: object) -> RankView | None:
    """Returns what a strategy shows of this rank; None for a strategy that shows nothing."""
    return strategy.view() if isinstance(strategy, Viewable) else None

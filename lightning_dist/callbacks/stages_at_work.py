"""The stages that a strategy runs, whichever strategy it is."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy

from lightning_dist.pipeline.pipeline import Pipeline
from lightning_dist.strategies.mesh import MeshStrategy
from lightning_dist.strategies.pipeline import PipelineStrategy
from lightning_dist.strategies.staged_module import StagedModule


def pipeline_of(strategy: Strategy) -> Pipeline | None:
    """Gives this rank's part of a pipeline, while a run is set up.

    Args:
        strategy: Any.

    Returns:
        None where there are no stages.
    """
    if isinstance(strategy, PipelineStrategy):
        return strategy.session.pipeline
    if isinstance(strategy, MeshStrategy) and isinstance(strategy.sharded, StagedModule):
        return strategy.sharded.session.pipeline
    return None

"""The stages that a strategy runs, whichever strategy it is."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.strategies.mesh import MeshStrategy
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipeline import PipelineStrategy
from lightning_dist.strategies.pipelining.session import Session


def pipeline_of(strategy: Strategy) -> Pipeline | None:
    """Gives this rank's part of a pipeline, while a run is set up.

    Args:
        strategy: Any.

    Returns:
        None where there are no stages.
    """
    session = session_of(strategy)
    return None if session is None else session.pipeline


def session_of(strategy: Strategy) -> Session | None:
    """Gives what a pipeline has at work, as :func:`pipeline_of`.

    Args:
        strategy: Any.
    """
    if isinstance(strategy, PipelineStrategy):
        return strategy.session
    if isinstance(strategy, MeshStrategy) and isinstance(strategy.sharded, StagedModule):
        return strategy.sharded.session
    return None

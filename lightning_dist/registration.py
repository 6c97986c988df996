"""The names under which ``L.Trainer(strategy=...)`` finds strategies of this package."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from lightning_dist.strategies.auto import AutoStrategy
from lightning_dist.strategies.pipeline import PipelineStrategy


def register_strategies() -> None:
    """Registers ``auto_dist``, ``pipeline`` and one name per schedule; does so once."""
    if "pipeline" in StrategyRegistry.available_strategies():
        return
    StrategyRegistry.register(
        "pipeline", PipelineStrategy, description="Pipeline stages under an unchanged module"
    )
    StrategyRegistry.register(
        "auto_dist", AutoStrategy, description="The fastest mesh of a measured module"
    )
    for schedule in SCHEDULE_NAMES:
        StrategyRegistry.register(
            f"pipeline_{schedule}",
            PipelineStrategy,
            description=f"Pipeline stages with the {schedule} schedule",
            schedule=schedule,
        )

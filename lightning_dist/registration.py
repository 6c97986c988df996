"""What importing the package tells Lightning.

The names under which ``L.Trainer(strategy=...)`` finds the strategies, and whom to ask about a
precision.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dist.engine.schedules.schedules import SCHEDULE_NAMES
from lightning_dist.precision_checks import check_asked_precision
from lightning_dist.strategies.base.lightning_internals import watch_precision
from lightning_dist.strategies.pipeline import PipelineStrategy


def register_strategies() -> None:
    """Registers ``pipeline`` and one name per schedule, and a check; does so once."""
    if "pipeline" in StrategyRegistry.available_strategies():
        return
    watch_precision(check_asked_precision)
    StrategyRegistry.register(
        "pipeline", PipelineStrategy, description="Pipeline stages under an unchanged module"
    )
    for schedule in SCHEDULE_NAMES:
        StrategyRegistry.register(
            f"pipeline_{schedule}",
            PipelineStrategy,
            description=f"Pipeline stages with the {schedule} schedule",
            schedule=schedule,
        )

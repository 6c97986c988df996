"""Register the package with Lightning, when it is imported.

Lightning gets the names under which ``L.Trainer(strategy=...)`` finds the strategies, and a check
of the precision.

Refuse precisions that Lightning would replace by others without the user's consent.
"""

from __future__ import annotations

from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from lightning_dist.strategies.base.lightning_internals import watch_precision
from lightning_dist.strategies.base.process_mesh import ProcessMesh
from lightning_dist.strategies.pipeline import PipelineStrategy


def check_asked_precision(strategy: Strategy, precision: str, accelerator: Accelerator) -> None:
    """Checks a Trainer's precision, if its strategy is one of this package.

    Args:
        strategy: The Trainer's strategy.
        precision: The precision, as given to the Trainer.
        accelerator: The Trainer's accelerator.

    Raises:
        ValueError: Lightning would train in another precision.
    """
    is_changed = precision == "16-mixed" and isinstance(accelerator, CPUAccelerator)
    if is_changed and isinstance(strategy, ProcessMesh):
        raise ValueError(
            "precision='16-mixed' on a CPU: Lightning would train in 'bf16-mixed' in its place."
            " Pass precision='bf16-mixed', or, for fp16 with a loss scale,"
            " callbacks=[MixedPrecision('fp16')] of lightning_dist.callbacks and no precision."
        )


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

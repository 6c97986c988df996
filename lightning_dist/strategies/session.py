"""Everything of a pipeline that exists between a strategy's ``setup`` and its ``teardown``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_dist.pipeline.connect import Channels
from lightning_dist.pipeline.pipeline import Pipeline
from lightning_dist.strategies.stage_metrics import StageMetrics
from lightning_dist.strategies.step_runner import StepRunner
from lightning_dist.strategies.updates import Updates


@dataclass(frozen=True, slots=True)
class Session:
    """The parts at work.

    Attributes:
        pipeline: This rank's stage.
        channels: To the other stages.
        metrics: The module's torchmetrics objects.
        runner: Runs the user's steps.
        updates: Applies the gradients.
        undo: Gives the module, the trainer and its plugins back as they were.
    """

    pipeline: Pipeline
    channels: Channels
    metrics: StageMetrics
    runner: StepRunner
    updates: Updates
    undo: tuple[Callable[[], None], ...]

    def close(self, *, failed: bool) -> None:
        """Ends everything; each rank must call it.

        Args:
            failed: Whether the run did not end well.
        """
        if failed:
            self.pipeline.clear()
        for undo in self.undo:
            undo()
        self.metrics.detach()
        self.pipeline.stage.detach()
        self.channels.close()


def drain_before_validation(
    module: pl.LightningModule, drain: Callable[[], None]
) -> Callable[[], None]:
    """Drains before each validation inside of ``fit``.

    ``on_validation_model_zero_grad`` is the one hook that Lightning calls exactly then while the
    module is still in training mode: later ones come after ``module.eval()``, where a backward that
    recomputes activations would do so without dropout.

    Args:
        module: The user's module; changed until the returned function is called.
        drain: Runs the backwards in flight.

    Returns:
        Undoes the change.
    """
    release_gradients = module.on_validation_model_zero_grad

    def drain_and_release() -> None:
        drain()
        release_gradients()

    module.on_validation_model_zero_grad = drain_and_release  # type: ignore[method-assign]

    def undo() -> None:
        del module.on_validation_model_zero_grad

    return undo

"""Refuse precisions that Lightning would make other ones without the user's consent."""

from __future__ import annotations

from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies import Strategy

from lightning_dist.strategies.base.process_mesh import ProcessMesh


def check_asked_precision(strategy: Strategy, precision: str, accelerator: Accelerator) -> None:
    """Checks what a Trainer was asked for, if it was asked for a strategy of this package.

    Args:
        strategy: The Trainer's.
        precision: As given to the Trainer.
        accelerator: The Trainer's.

    Raises:
        ValueError: It would train in another precision.
    """
    is_changed = precision == "16-mixed" and isinstance(accelerator, CPUAccelerator)
    if is_changed and isinstance(strategy, ProcessMesh):
        raise ValueError(
            "precision='16-mixed' on a CPU: Lightning would train in 'bf16-mixed' in its place."
            " Pass precision='bf16-mixed', or, for fp16 with a loss scale,"
            " callbacks=[MixedPrecision('fp16')] of lightning_dist.callbacks and no precision."
        )

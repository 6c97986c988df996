"""Refuse what tensor parallelism cannot do, on all ranks alike, before any waits for another."""

from __future__ import annotations


def check_precision(precision: str, tp_size: int) -> None:
    """Checks that tensor-parallel ranks skip the same steps.

    Args:
        precision: The Trainer's.
        tp_size: Tensor-parallel ranks.

    Raises:
        ValueError: Each would decide for itself.
    """
    if precision == "16-mixed" and tp_size > 1:
        raise ValueError(
            f"precision='16-mixed' with tp_size={tp_size}: each rank's loss scaler looks at its own"
            " part of the gradients, and ranks would skip different steps. Use 'bf16-mixed'."
        )

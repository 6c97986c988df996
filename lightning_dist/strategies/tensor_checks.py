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


def check_tp_size(tp_size: int, world_size: int) -> None:
    """Checks that the tensor-parallel ranks fill the world.

    Args:
        tp_size: Ranks that share each layer.
        world_size: All ranks.

    Raises:
        ValueError: They do not.
    """
    if tp_size < 1 or world_size % tp_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"tp_size={tp_size} does not divide the world of {world_size} processes; use one of"
            f" {divisors}, or 'auto' for all."
        )

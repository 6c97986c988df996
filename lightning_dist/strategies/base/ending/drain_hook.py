"""Catch up before each validation, where the weights in use are not yet those to look at.

An asynchronous pipeline has batches in flight then, local SGD has replicas that differ.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_dist.engine.tensors.replaced_method import replace_method


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

    return replace_method(module, "on_validation_model_zero_grad", drain_and_release)

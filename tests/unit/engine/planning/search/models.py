"""Models by their costs, for tests of the search."""

from __future__ import annotations

import random

from lightning_dist.engine.planning.layer_costs import LayerCosts, StepCosts
from lightning_dist.engine.planning.search.model_costs import (
    MeasuredBatch,
    ModelCosts,
    TensorCosts,
)


def measured(num_samples: int, num_layers: int = 4, seed: int | None = None) -> MeasuredBatch:
    """Layers of 1 s and 2 s per sample, or of drawn times; of 100 bytes, and 10 kept per sample."""
    draw = random.Random(seed)
    factors = [1.0 if seed is None else draw.uniform(0.5, 2.0) for _ in range(num_layers)]
    layers = tuple(
        LayerCosts(
            f"{index}",
            forward_seconds=factor * num_samples,
            backward_seconds=2.0 * factor * num_samples,
            boundary_bytes=4 * num_samples,
            parameter_bytes=100,
            activation_bytes=10 * num_samples,
        )
        for index, factor in enumerate(factors)
    )
    return MeasuredBatch(num_samples, StepCosts(layers, update_seconds=4.0), 6 * num_samples)


def model(num_layers: int = 4, seed: int | None = None, tensor: bool = False) -> ModelCosts:
    """A model that was measured with 1 and 4 samples."""
    sizes = tuple(measured(size, num_layers, seed) for size in (1, 4))
    if not tensor:
        return ModelCosts(sizes)
    sharded = TensorCosts(
        (0.5,) * num_layers, 2 * num_layers, 2 * num_layers, 40.0, (1,) * num_layers
    )
    return ModelCosts(sizes, tensor={2: sharded})

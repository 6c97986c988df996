"""Find losses in attributes of layers, which the last stage would miss.

Examples are the balancing loss of a mixture of experts, a codebook's commitment loss, and a
Bayesian layer's divergence. A layer puts such a loss into an attribute, and the user's step sums
those of all layers. The step ends on the last stage, where other stages' layers are missing, so the
sum would silently be too small. Gradients reach such a value from no output of the stage. A stored
attention map, in contrast, lies on the way of the outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_dist.engine.pipeline.split_backward import nodes_beneath
from lightning_dist.engine.tensors.tree import flatten


def check_no_side_losses(layers: nn.Module, stage_index: int, output: Any) -> None:
    """Checks that no attribute of the layers holds a loss that the last stage would miss.

    Args:
        layers: Layers of a stage that is not the last; their forward is over.
        stage_index: The stage.
        output: Output of the stage, with its autograd graph.

    Raises:
        ValueError: An attribute holds a tensor with an autograd graph of its own.
    """
    held = [
        (f"{name}.{attribute}".lstrip("."), tensor)
        for name, part in layers.named_modules()
        for attribute, value in (*part.named_buffers(recurse=False), *vars(part).items())
        if attribute != "_parameters"  # for a step these may be casts, which have a graph
        for tensor in _tensors_in(value)
        if tensor.grad_fn is not None
    ]
    if not held:
        return
    beneath = nodes_beneath([t for t in flatten(output)[0] if t.requires_grad])
    for name, tensor in held:
        if tensor.grad_fn not in beneath:
            raise ValueError(
                f"The forward of a layer on stage {stage_index} leaves a tensor with gradients in"
                f" {name!r}. Your step ends on the last stage, where that layer is not, so a loss"
                " made of it would be left out there, and the layer trained without it. Let the"
                " layer return it with its activations, or store its `.detach()` if no loss is made"
                " of it."
            )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    # Not `flatten`, which also rebuilds the containers, and so a user's dataclasses.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set | deque):
        for held in value:
            yield from _tensors_in(held)

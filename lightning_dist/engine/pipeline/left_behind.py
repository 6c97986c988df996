"""What a stage's layers leave in attributes for a loss that is computed on another rank.

The balancing loss of a mixture of experts, a codebook's commitment loss, a Bayesian layer's
divergence: a layer puts it into an attribute, and the user's step adds up those of all layers. The
step ends on the last stage, where other stages' layers are not. It would add up fewer of them, and
nobody would be told. Such a value is known by where gradients flow: they come to it from no output
of the stage. An attention's map, kept to be looked at, lies on the way of the outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_dist.engine.pipeline.backward_graph import nodes_beneath
from lightning_dist.engine.tensors.tree import flatten


def refuse_left_behind(layers: nn.Module, stage_index: int, output: Any) -> None:
    """Refuses what only a loss elsewhere could be for.

    Args:
        layers: Of a stage that is not the last; their forward is over.
        stage_index: The stage.
        output: Of the stage, with its graph.

    Raises:
        ValueError: An attribute holds a tensor with a graph of its own.
    """
    held = [
        (f"{name}.{attribute}".lstrip("."), tensor)
        for name, part in layers.named_modules()
        for attribute, value in (*part.named_buffers(recurse=False), *vars(part).items())
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
    # Not `flatten`, which puts all that it takes apart together again, a user's dataclasses too.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set | deque):
        for held in value:
            yield from _tensors_in(held)

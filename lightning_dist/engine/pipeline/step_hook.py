"""Where the user's step meets the pipelined module.

The module's forward is replaced, so that the user's unchanged step runs the layers of the current
stage there. On all stages but the last the step has nothing to go on with. So an exception leaves
the step at this point, and :meth:`ForwardInterceptor.run` catches it.

:func:`behind_leaf` gives layers tensors that they may write into.

The tensors that a stage receives are leaves, so that autograd returns their gradients. Autograd
refuses to write in place into a leaf or into a view of one. On a single device the same layer
(``nn.ReLU(inplace=True)``, say) would get the previous layer's output, which is no leaf.

:func:`check_no_side_losses` looks for attributes that hold a loss for another rank.

Examples are the balancing loss of a mixture of experts, a codebook's commitment loss, and a
Bayesian layer's divergence. A layer puts such a loss into an attribute, and the user's step sums
those of all layers. The step ends on the last stage, where other stages' layers are missing, so the
sum would silently be too small. Gradients reach such a value from no output of the stage. A stored
attention map, in contrast, lies on the way of the outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.split_backward import nodes_beneath
from lightning_dist.engine.splitting.remote_layers import RemoteLayersView
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.tree import flatten


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # not a view in autograd's books

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def behind_leaf(tensor: Tensor) -> Tensor:
    """Returns an alias of a leaf, with the same memory, that is no leaf.

    Args:
        tensor: Any; a tensor that requires no gradient, or is no leaf, is returned unchanged.
    """
    if not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


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


class StopForward(BaseException):  # noqa: N818  (it is not an error)
    """Raised to leave the user's step after the pipelined module's forward.

    Not an ``Exception``, so that a user's ``except Exception`` does not stop it.
    """


class ForwardInterceptor:
    """Replaces the forward of the pipelined module.

    Args:
        sequence: The pipelined module.
        sight: What a step sees of the remote layers.
        is_whole: Whether all layers are on this rank, so that the module may be called at any time.
    """

    def __init__(self, sequence: nn.Module, sight: RemoteLayersView, *, is_whole: bool) -> None:
        self._sight = sight
        self._is_whole = is_whole
        self._own_forward: Callable[..., Any] = sequence.forward
        self._layers: Callable[..., Any] | None = None
        self._outputs: list[Any] = []
        self._leaves = False
        self._undo = replace_method(sequence, "forward", self._forward)

    def detach(self) -> None:
        """Restores the sequence's own forward."""
        self._undo()
        self._sight.end()

    def run(self, step: Callable[[], Any], layers: Callable[..., Any], *, leaves: bool) -> Any:
        """Runs a step with ``layers`` in place of the pipelined module's forward.

        Args:
            step: The step, which must call the module once.
            layers: Replaces the module's forward; takes the arguments of that call.
            leaves: Whether the step ends after that call.

        Returns:
            The layers' output if the step ends after the call, else the step's output.

        Raises:
            ValueError: The step did not call the pipelined module exactly once.
        """
        self._layers, self._leaves, self._outputs = layers, leaves, []
        result = None
        try:
            with self._sight.in_step():
                result = step()
        except StopForward:
            (result,) = self._outputs
        finally:
            outputs, self._outputs, self._layers = self._outputs, [], None
        if not outputs:
            raise ValueError(
                "The step ended without a call of the pipelined module, so there is nothing to"
                " cut. Call it once in each step, or name another module with `layers=`."
            )
        return result

    def _forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self._layers is None:
            if self._is_whole:
                return self._own_forward(*arguments, **keywords)
            raise ValueError(
                "The pipelined module was called outside of a step. Its layers are on several"
                " ranks: call it inside training_step, validation_step, test_step or"
                " predict_step."
            )
        if self._outputs:
            raise ValueError(
                "The step called the pipelined module twice. A pipeline runs each layer once per"
                " micro-batch: call the module once per step, or on a concatenated batch."
            )
        self._outputs.append(self._layers(*arguments, **keywords))
        if self._leaves:
            raise StopForward
        return self._outputs[0]

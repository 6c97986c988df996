"""A backward in two parts: gradients of the inputs first, those of the weights when there is time.

Asking autograd twice would compute the chain through the layers twice. torch knows how to stop at
the nodes from which only weights are reached and to go on from there later; its functions for that
are private, and this is the one place that uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_dist.pipeline.alias import no_view


class PartedBackward:
    """The backward of one micro-batch on one stage.

    Args:
        outputs: Roots of the graph.
        gradients: One for each of them.
        inputs: Leaves that are no parameters.
        parameters: The stage's trainable ones by name.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._outputs = list(outputs)
        self._gradients = list(gradients)
        self._inputs = list(inputs)
        # Leaves all the same where they stand for parameters.
        self._parameters: list[Any] = list(parameters.values())
        self._groups: list[dict[str, Any]] = []

    def run_inputs(self) -> list[Tensor | None]:
        """Runs the first part.

        Returns:
            One gradient for each input.
        """
        if not self._inputs or not self._outputs:
            return [None] * len(self._inputs)
        outputs = [no_view(output) for output in self._outputs]  # they are cut off in place
        found, self._groups = stage_backward_input(
            outputs, self._gradients, self._inputs, iter(self._parameters)
        )
        for tensor in self._inputs:
            tensor.grad = None
        self._outputs, self._gradients = [], []  # the graph behind them is not needed any more
        return list(found)

    def run_weights(self) -> list[Tensor | None]:
        """Runs the second part; on a stage without inputs, all of it.

        Returns:
            One gradient for each parameter.
        """
        if not self._inputs:
            return self._run_whole()
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        stage_backward_weight(iter(self._parameters), self._groups)
        found = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient
        return found

    def _run_whole(self) -> list[Tensor | None]:
        if not self._outputs or not self._parameters:
            return [None] * len(self._parameters)
        return list(
            torch.autograd.grad(self._outputs, self._parameters, self._gradients, allow_unused=True)
        )

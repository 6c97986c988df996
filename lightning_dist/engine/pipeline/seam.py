"""Where the user's step meets the pipelined module.

The module's forward is replaced, so that the step, which nobody rewrote, runs whatever the stage
at hand wants to run there. On all stages but the last there is nothing for the step to go on with,
so it is left at this point by an exception that :meth:`Seam.run` catches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_dist.engine.splitting.remote_layers import WholeInSight
from lightning_dist.engine.tensors.replaced_method import replace_method


class _StepLeft(BaseException):  # noqa: N818  (it is not an error)
    """Leaves the user's step behind the pipelined module.

    Not an ``Exception``, so that a user's ``except Exception`` does not stop it.
    """


class Seam:
    """Stands in for the forward of the pipelined module.

    Args:
        sequence: The pipelined module.
        sight: What a step sees of the layers that are not here.
        is_whole: Whether all of its layers are here, so that it may be called at any time.
    """

    def __init__(self, sequence: nn.Module, sight: WholeInSight, *, is_whole: bool) -> None:
        self._sight = sight
        self._is_whole = is_whole
        self._own_forward: Callable[..., Any] = sequence.forward
        self._layers: Callable[..., Any] | None = None
        self._outputs: list[Any] = []
        self._leaves = False
        self._undo = replace_method(sequence, "forward", self._forward)

    def detach(self) -> None:
        """Gives the sequence its own forward back."""
        self._undo()
        self._sight.end()

    def run(self, step: Callable[[], Any], layers: Callable[..., Any], *, leaves: bool) -> Any:
        """Runs a step in which the pipelined module runs something.

        Args:
            step: Must call the module once.
            layers: What it runs; takes the arguments of that call.
            leaves: Whether the step ends there.

        Returns:
            What the layers returned, if the step ends there; else what the step returned.

        Raises:
            ValueError: The step did not call the pipelined module exactly once.
        """
        self._layers, self._leaves, self._outputs = layers, leaves, []
        result = None
        try:
            with self._sight.in_step():
                result = step()
        except _StepLeft:
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
            raise _StepLeft
        return self._outputs[0]

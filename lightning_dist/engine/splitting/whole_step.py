"""A pipeline of one stage, whose one layer is the user's whole step.

No module is cut, so no module has to be found in the step. The step may call any of the user's
modules as often as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_dist.engine.splitting.layers import Layers


class WholeStep(Layers):
    """A user's whole module as one layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, [("",)])

    @override
    def stage(self, first: int, end: int) -> nn.Module:
        return _Step(self.module)

    @override
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        (step,) = arguments
        return step


class StepInterceptor:
    """Takes the place of :class:`.ForwardInterceptor`, around the whole step."""

    def detach(self) -> None:
        """Does nothing: no forward has been replaced."""

    def run(self, step: Callable[[], Any], layers: Callable[..., Any], *, leaves: bool) -> Any:
        """Runs a step as the layers of its stage.

        Args:
            step: The user's step.
            layers: Function that runs the step under the stage's weights.
            leaves: Whether there are later stages; must be False.
        """
        assert not leaves
        return layers(step)


class _Step(nn.Module):
    """Runs steps; has the user's tensors and submodules under the same names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The same dicts, so that weights swapped in one module are swapped in both.
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()

"""The layers of a pipelined module: their places, and how a stage runs them.

A layer is the unit of a partition. In an ``nn.Sequential`` each child is a layer, and a stage runs
its own layers one after the other. Other modules hold layers in other ways
(:mod:`.splitting.blocks`), so code that cuts or runs a model uses this class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.splitting.loss_parameters import LossParameters
from lightning_dist.engine.splitting.placed_parameters import PlacedParameters
from lightning_dist.engine.splitting.remote_layer import RemoteLayer, describe
from lightning_dist.engine.tensors.compiler import PausedCompiler
from lightning_dist.engine.tensors.patch import replaced


class Part(NamedTuple):
    """One submodule of a layer.

    Attributes:
        name: The submodule's name in the pipelined module.
        module: The present module of that name, a :class:`.RemoteLayer` if it is remote.
        layer_index: Index of the layer.
    """

    name: str
    module: nn.Module
    layer_index: int


class Layers:
    """The layers of a pipelined module, in the order in which they run.

    A subclass implements :meth:`stage` and :meth:`layer_input`.

    Args:
        module: The pipelined module.
        names: Names of each layer's submodules.

    Attributes:
        origin: Where the layers come from, in a few words; empty for an ``nn.Sequential``.
        compiler: The compiler of the pipelined module's calls.
        loss_parameters: What steps use behind the pipelined module, of the user's module.
        users_module: The user's module, as far as it is known.
        traced_module: The traced module, by which steps read the layers' parameters; None if the
            layers are not of a trace.
    """

    def __init__(self, module: nn.Module, names: Sequence[Sequence[str]]) -> None:
        self.module = module
        self.names = tuple(tuple(group) for group in names)
        self.origin = ""
        self.compiler = PausedCompiler()
        self.loss_parameters = LossParameters(module)
        self.users_module = module
        self.traced_module: nn.Module | None = None
        self._remote: list[RemoteLayer] = []

    def __len__(self) -> int:
        """Returns the number of layers."""
        return len(self.names)

    def parts(self) -> list[Part]:
        """Lists all submodules of all layers."""
        return [
            Part(name, self.module.get_submodule(name), index)
            for index, group in enumerate(self.names)
            for name in group
        ]

    @property
    def placed(self) -> tuple[PlacedParameters, ...]:
        """What belongs to a layer's stage, but to none of its submodules."""
        return (self.loss_parameters,)

    @property
    def stands_alone(self) -> bool:
        """Whether a plain loop has given the layers, so that no module around them is known."""
        return False

    def layer_of(self, placed: PlacedParameters) -> int:
        """Returns the layer with whose stage some of :attr:`placed` are."""
        return 0 if placed.is_first else len(self) - 1

    def placed_here(self) -> list[nn.Parameter]:
        """Lists those of :attr:`placed` that this rank has."""
        return [p for placed in self.placed for p in placed.parameters().values()]

    def stage(self, first: int, end: int) -> nn.Module:
        """Returns a module that runs layers of this rank, from a first to before an end.

        It has them under their own names, and is called with the result of :meth:`layer_input`.
        """
        raise NotImplementedError

    def take_replaced(self) -> None:
        """Takes new parameters that have replaced others in the module."""

    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        """Returns the input of a stage's layers.

        It is made of the activation from the stage before, and of the positional and keyword
        arguments of the pipelined module's call in the user's step.
        """
        raise NotImplementedError

    def run(self, stage: nn.Module, value: Any) -> Any:
        """Runs a stage's layers, compiled if the call of the pipelined module is."""
        return stage(value)

    def beside(self, layer_index: int) -> dict[str, Tensor]:
        """Returns the tensors that a layer of this rank uses and its submodules do not hold."""
        return {}

    @contextmanager
    def in_step(self, *, is_last: bool) -> Iterator[None]:
        """Returns the context manager for a user's step, on the last stage or on another one."""
        with self.listing_remote_layers(), self.loss_parameters.in_step(is_last=is_last):
            yield

    def copied_buffers(self) -> AbstractContextManager[None]:
        """Returns a context manager in which steps write into copies of buffers beside the layers.

        A rank of several stages runs the step on each of them, and keeps what the last one writes.
        """
        layers = {id(buffer) for buffer in self.buffers()}
        return replaced(
            [
                (part._buffers, name, buffer.clone())
                for part in self.users_module.modules()
                for name, buffer in part._buffers.items()
                if buffer is not None and id(buffer) not in layers
            ]
        )

    def buffers(self) -> list[Tensor]:
        """Lists the layers' buffers on this rank."""
        return [buffer for part in self.parts() for buffer in part.module.buffers()]

    def in_call(self, given: object) -> AbstractContextManager[None]:
        """Returns the context manager for the layers in a step, called with some arguments."""
        return self.loss_parameters.in_call(given)

    @contextmanager
    def listing_remote_layers(self) -> Iterator[None]:
        """Returns a context manager in which walks through the model list remote layers."""
        for layer in self._remote:
            layer.is_listed = True
        try:
            with ExitStack() as stack:
                for placed in self.placed:
                    stack.enter_context(placed.as_remote())
                yield
        finally:
            for layer in self._remote:
                layer.is_listed = False

    def finish_cut(self, own_layers: Sequence[int], beside: Mapping[str, Tensor]) -> None:
        """Ends a cut, or a change of it, after the submodules have been exchanged.

        Args:
            own_layers: Indices of this rank's layers from now on.
            beside: Tensors that :meth:`beside` returned for the layers that came.
        """
        for placed in self.placed:
            placed.finish_cut(is_here=self.layer_of(placed) in own_layers)

    def attach(self, device: torch.device) -> None:
        """Prepares the cut module for calls of stages, as if remote tensors were on a device."""
        for placed in self.placed:
            placed.attach(device)
        modules = (part.module for part in self.parts())
        self._remote = [module for module in modules if isinstance(module, RemoteLayer)]
        for layer in self._remote:
            layer.set_description(describe(layer, device))

    def detach(self) -> None:
        """Undoes :meth:`attach`."""
        for layer in self._remote:
            layer.set_description(layer.skeleton)
        self._remote = []


class LayerSequence(Layers):
    """The children of an ``nn.Sequential``."""

    def __init__(self, module: nn.Sequential) -> None:
        # `named_children` lists a child once, but one activation module may occur several times.
        super().__init__(module, [(name,) for name in module._modules])

    @property
    @override
    def stands_alone(self) -> bool:
        return self.users_module is self.module

    @override
    def stage(self, first: int, end: int) -> nn.Sequential:
        own = (part for part in self.parts() if first <= part.layer_index < end)
        return nn.Sequential(OrderedDict((part.name, part.module) for part in own))

    @override
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        return arguments[0] if is_first else received

    @override
    def run(self, stage: nn.Module, value: Any) -> Any:
        return self.compiler.resume(stage, value)


class WholeStep(Layers):
    """A user's whole step as the one layer of a pipeline of one stage.

    No module is cut, so none has to be found in the step, which may call any of the user's modules
    as often as it likes.
    """

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

    def __init__(self, found: Layers) -> None:
        self.found = found

    def detach(self) -> None:
        """Does nothing: no forward has been replaced."""

    def run(self, step: Callable[[], Any], layers: Callable[..., Any], *, leaves: bool) -> Any:
        """Runs a step as the layers of its stage, which is the last."""
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


def layers_in(module: nn.Sequential | Layers) -> Layers:
    """Returns the layers of a sequence; layers are returned as they are.

    Raises:
        ValueError: The module has a forward of its own.
    """
    if isinstance(module, Layers):
        return module
    if type(module).forward is not nn.Sequential.forward:
        raise ValueError(
            "Pass the `layers` that `find_split` finds, or a plain `nn.Sequential`: a"
            f" {type(module).__name__} has a forward of its own, and its children, run one after"
            " the other, would be another model."
        )
    return LayerSequence(module)

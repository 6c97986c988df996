"""A traced module as a sequence of layers that the rest of the pipeline can cut, run and stash.

The user's module keeps its parts, their modes, and the names of its parameters. Only its forward is
replaced by the sequence. Each layer holds the parameters that its operations use. These are the
same objects as in the module, for gradients, optimizers and weight versions. Buffers are looked up
in the module when a layer runs. :mod:`.tracing.program` has the layers' graphs.

So a cut has two sides. In the sequence, layers of other ranks become remote layers, as in any
other one. They keep the shapes, for layers that move to this rank later. In the user's module the
parts stay, and only their tensors are removed (:mod:`.splitting.removed_tensors`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.checkpoint.saved_names import names_of_saved
from lightning_dist.engine.splitting.blocks.blocks import without_cache
from lightning_dist.engine.splitting.layers import LayerSequence
from lightning_dist.engine.splitting.loss_parameters import LossParameters
from lightning_dist.engine.splitting.removed_tensors import RemovedTensors
from lightning_dist.engine.splitting.tracing.program import TraceProgram
from lightning_dist.engine.tensors.compiler import refuse_wrapper

_NO_VALUE = (
    "The value of {name!r} was asked for, but its stage is on another rank. In a step only"
    " the traced module's own forward may use it, and that runs in the traced direction. Let other"
    " weights follow these, as a teacher's, in `on_train_batch_end`, by name. To run the layers"
    " another way, as an inverse to draw samples, load the checkpoint on one device, or use"
    " DDPStrategy."
)
_NO_CALL = (
    "{name!r} has parameters on another rank. Call the whole traced module, not its parts, and"
    " only inside training_step, validation_step, test_step or predict_step; for the whole model in"
    " one process load a checkpoint with `lightning_dist.checkpoint.load_full`."
)


class TracedLayer(nn.Module):
    """One layer, with its parameters by their names in the traced module."""

    def __init__(
        self, program: TraceProgram, index: int, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self._program = program
        self._index = index
        for name, parameter in parameters.items():
            self.register_parameter(name.replace(".", "/"), parameter)
        self._keys = {name: name.replace(".", "/") for name in parameters}

    def named_tensors(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by their names in the traced module."""
        # Not from `named_parameters`: versions of weights stand in their places at times.
        return {name: self._parameters[key] for name, key in self._keys.items()}  # type: ignore[misc]

    def take_from(self, module: nn.Module) -> None:
        """Takes the parameters that the traced module has at present."""
        for name, key in self._keys.items():
            self._parameters[key] = module.get_parameter(name)

    def forward(self, values: Any) -> Any:
        """Runs the layer on the output of the layer before, or the leaves of the call."""
        return self._program.run(self._index, values, self.named_tensors())


class TracedLayers(LayerSequence):
    """The layers of a traced module, which replace its forward; its buffers are beside them.

    The arguments are as for :class:`.TraceProgram`.

    Attributes:
        program: The layers' graphs.
        saved: Names of the module's tensors, by their keys in its state dict.
        away: The module's tensors that other ranks hold.

    Raises:
        ValueError: The module cannot be traced.
    """

    traced_module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        casts: Callable[[nn.Module], None] | None = None,
    ) -> None:
        refuse_wrapper(module)
        program = TraceProgram(module, args, without_cache(module, kwargs), casts)
        parameters = dict(module.named_parameters())
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, own in enumerate(program.names):
            used = {name: p for name, p in parameters.items() if name in own}
            layers[str(index)] = TracedLayer(program, index, used)
        super().__init__(nn.Sequential(layers))
        self.program = program
        self.saved = names_of_saved(module)
        self.away = RemovedTensors(module, _NO_VALUE, _NO_CALL)
        self.traced_module = module
        self.loss_parameters = LossParameters(module)
        self.origin = "traced from its first call"
        module.forward = _TracedForward(self)

    def names_in(self, layers: Sequence[int]) -> set[str]:
        """Returns all names that the tensors of some layers have in the traced module."""
        first = frozenset[str]().union(*(self.program.names[index] for index in layers))
        return {name for name, canonical in self.program.canonical.items() if canonical in first}

    def _parameters_of(self, layer_index: int) -> dict[str, nn.Parameter]:
        layer = self.module.get_submodule(str(layer_index))
        assert isinstance(layer, TracedLayer)
        return layer.named_tensors()

    @override
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        value = super().layer_input(is_first, received, arguments, keywords)
        # A backward that runs the layers again may come behind a later call, of another graph.
        return self.program.same_graph(), value

    @override
    def run(self, stage: nn.Module, value: Any) -> Any:
        go_back, value = value
        go_back()
        if self.compiler.is_paused:
            warnings.warn(
                "torch.compile does not reach the layers of a traced model on stages, so they run"
                " uncompiled. If the model has a list of blocks, name it with `layers=`: blocks"
                " are compiled.",
                stacklevel=2,
            )
        return stage(value)

    @override
    def beside(self, layer_index: int) -> dict[str, Tensor]:
        names = self.program.names[layer_index]
        buffers = names - self._parameters_of(layer_index).keys()
        return {name: self.traced_module.get_buffer(name) for name in buffers}

    @override
    def buffers(self) -> list[Tensor]:
        return [*self.traced_module.buffers()]  # of which a layer's are looked up there

    @override
    def take_replaced(self) -> None:
        for part in self.parts():
            if isinstance(part.module, TracedLayer):
                part.module.take_from(self.traced_module)

    @override
    def attach(self, device: torch.device) -> None:
        super().attach(device)
        self.away.describe(device)  # a step sees the traced module, not the layers

    @override
    @contextmanager
    def listing_remote_layers(self) -> Iterator[None]:
        with self.away.as_remote():
            yield

    @override
    def finish_cut(self, own_layers: Sequence[int], beside: Mapping[str, Tensor]) -> None:
        super().finish_cut(own_layers, beside)
        away, canonical = self.away, self.program.canonical
        known: dict[str, Tensor] = dict(beside)
        for index in own_layers:
            known |= self._parameters_of(index)
        own = self.names_in(own_layers)
        away.restore({name: known[canonical[name]] for name in own & away.names})
        away.take(self.names_in(range(len(self))) - own - away.names)


class _TracedForward:
    """The forward of a traced module, with the signature of the user's own."""

    def __init__(self, layers: TracedLayers) -> None:
        update_wrapper(self, layers.traced_module.forward)
        self.layers = layers
        self._paused = layers.compiler.pause(self._run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._paused(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = without_cache(self.layers.traced_module, kwargs)
        return self.layers.module(self.layers.program.begin(args, given))


def traced_layers(module: nn.Module) -> TracedLayers | None:
    """Returns the layers of a module that has been traced before; else None."""
    forward = vars(module).get("forward")
    return forward.layers if isinstance(forward, _TracedForward) else None

"""Descriptions of other ranks' layers: their structure, without values.

A layer's submodules, settings and methods are as they were when the model was cut. Its tensors are
remote tensors (:mod:`.tensors.remote_tensor`). So are the attributes that its forward writes: their
initial values would be wrong numbers on this rank.

While a user's step runs, walks through the model include the descriptions. Without them, a step
that adds up the norms of ``self.parameters()``, or the losses that layers have left in
``self.modules()``, would silently add up this rank's only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import ForeignLayer, Sight, foreign_layers, skeleton_of
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.tensors.forward_ast import written_by_forward
from lightning_dist.engine.tensors.remote_tensor import absent, absent_value

_READ_THERE = (
    "Use it where the layer runs only, or put both uses on one stage with `partition=`; or let"
    " layers='trace' see to what is used where."
)
_RETURN_IT = (
    "What a layer's forward leaves in an attribute does not travel: let it return the value, with"
    " its activations."
)


class RemoteLayersView:
    """Sets the descriptions of other ranks' layers, as if their tensors were on a device."""

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._found, self._device = layers, device
        self._layers = [layer for _, _, layer in foreign_layers(layers.module)]
        self._sight = Sight()
        for layer in self._layers:
            layer.answer_by(describe(layer, device), self._sight)

    def end(self) -> None:
        """Removes the descriptions."""
        for layer in self._layers:
            layer.answer_by(layer.skeleton, Sight())

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Returns a context manager in which walks through the module include the descriptions."""
        self._sight.is_open = True
        try:
            with self._found.in_step(self._device):
                yield
        finally:
            self._sight.is_open = False


def describe(layer: ForeignLayer, device: torch.device) -> nn.Module:
    """Creates the description of another rank's layer; a read of a value raises `ValueError`."""
    skeleton = layer.skeleton
    stand_ins: dict[int, Tensor] = {}
    tensors = [*skeleton.named_parameters(), *skeleton.named_buffers()]
    for name, tensor in tensors:
        dtype = layer.compute_dtypes.get(name, tensor.dtype)
        stand_ins[id(tensor)] = absent(tensor, dtype, device, _reason(layer, name, _READ_THERE))
    description = skeleton_of(skeleton, stand_ins)
    parts = dict(description.named_modules())
    kinds: set[type] = {type(part) for part in parts.values()}
    written = {name for kind in kinds for name in written_by_forward(kind)}
    for path, part in parts.items():
        for name in written:
            if _is_data(part, name):
                full_name = f"{path}.{name}" if path else name
                setattr(part, name, absent_value(_reason(layer, full_name, _RETURN_IT)))
    return description


def _is_data(part: nn.Module, name: str) -> bool:
    """Returns whether an attribute is data of the part or its class, and not of ``nn.Module``."""
    if name in vars(nn.Module()):
        return False
    try:
        return not hasattr(inspect.getattr_static(part, name), "__get__")
    except AttributeError:
        return False


def _reason(layer: ForeignLayer, name: str, fix: str) -> str:
    return (
        f"The value of {name!r} of layer {layer.name!r} was asked for, but that layer lives on"
        f" stage {layer.stage_index}, not on this rank. {fix}"
    )

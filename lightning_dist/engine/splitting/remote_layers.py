"""What other ranks' layers say of themselves here: their structure, and no values.

A layer's submodules, settings and methods are as they were when the model was cut. Its tensors say
what they are (:mod:`.tensors.remote_tensor`), and so does what its forward writes
into attributes: the value of the start, here for ever, would be a wrong number.

While a user's step runs, the model shows all of itself so. A step that adds up the norms of
``self.parameters()``, or the losses that layers have left in ``self.modules()``, would find this
rank's alone otherwise, and add up too few without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import ForeignLayer, foreign_layers, skeleton_of
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
    """Lets the layers of other ranks answer for themselves.

    Args:
        layers: Of the pipelined module, cut.
        device: Where tensors would be if this rank had them.
    """

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._enter = partial(layers.in_step, device)
        self._layers = [layer for _, _, layer in foreign_layers(layers.module)]
        for layer in self._layers:
            layer.answer_by(describe(layer, device))

    def end(self) -> None:
        """Leaves the layers as they were before."""
        for layer in self._layers:
            layer.answer_by(None)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Shows the layers to who walks through the module.

        Yields:
            Nothing.
        """
        for layer in self._layers:
            layer.is_in_sight = True
        try:
            with self._enter():
                yield
        finally:
            for layer in self._layers:
                layer.is_in_sight = False


def describe(layer: ForeignLayer, device: torch.device) -> nn.Module:
    """Makes a module that looks like another rank's layer.

    Args:
        layer: Stands for it here.
        device: Where its tensors would be if this rank had it.

    Returns:
        A copy of its structure, of which whatever needs a value is a ValueError.
    """
    skeleton = layer.skeleton
    stand_ins: dict[int, Tensor] = {}
    tensors = [*skeleton.named_parameters(), *skeleton.named_buffers()]
    for name, tensor in tensors:
        kind = layer.dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
        stand_ins[id(tensor)] = absent(tensor, kind, device, _reason(layer, name, _READ_THERE))
    description = skeleton_of(skeleton, stand_ins)
    _hide_what_is_written(description, layer)
    return description


def _hide_what_is_written(description: nn.Module, layer: ForeignLayer) -> None:
    parts = dict(description.named_modules())
    kinds: set[type] = {type(part) for part in parts.values()}
    written = {name for kind in kinds for name in written_by_forward(kind)}
    for path, part in parts.items():
        for name in written:
            if _is_data(part, name):
                full_name = f"{path}.{name}" if path else name
                setattr(part, name, absent_value(_reason(layer, full_name, _RETURN_IT)))


def _is_data(part: nn.Module, name: str) -> bool:
    """Whether an attribute is of the part's own or its class's, and no part of torch's module."""
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

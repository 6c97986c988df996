"""What a layer holds, taken out of its modules and put into others, in place.

A layer that moves leaves its structure behind and finds it at the other end, where it has stood
since the model was cut. So what travels is values: parameters, buffers (those that no checkpoint
has, too), gradients that wait for an update, and what a training loop may have changed on this rank
alone: which parameters are frozen, which parts are in training, and a module's ``extra_state``.

The modules stay the objects that they are, with their hooks, and a module that has been left holds
no memory, whoever may still refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LayerValues:
    """The values of some modules, as a tree that channels can send.

    Attributes:
        parameters: By name; they require grad if they are trained.
        buffers: By name.
        gradients: Of parameters, by name.
        is_training: Of all parts, by name.
        extra_states: Of the parts that have one, by name.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    is_training: Mapping[str, bool] = field(default_factory=dict)
    extra_states: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        held = (self.parameters, self.buffers, self.gradients)
        return sum(tensor.nbytes for tensors in held for tensor in tensors.values())


def values_of(modules: nn.Module, *, with_gradients: bool) -> LayerValues:
    """Looks at what modules hold; nothing is copied.

    Args:
        modules: Any, as one module.
        with_gradients: Whether gradients wait for an update.
    """
    parameters = dict(modules.named_parameters(remove_duplicate=False))
    gradients = {n: p.grad for n, p in parameters.items() if with_gradients and p.grad is not None}
    return LayerValues(
        {name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()},
        {name: b.detach() for name, b in modules.named_buffers(remove_duplicate=False)},
        gradients,
        {name: part.training for name, part in modules.named_modules()},
        {
            name: part.get_extra_state()
            for name, part in modules.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        },
    )


class Exchanged:
    """Puts tensors in the places of others; what was one tensor at several places stays one.

    Args:
        device: Of the new ones with values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id lasts

    def strip(self, modules: nn.Module) -> None:
        """Leaves modules their structure, on the meta device.

        Args:
            modules: Changed in place.
        """
        for name, tensor in _tensors_of(modules):
            _set(modules, name, self._once(tensor, lambda t: torch.empty_like(t, device="meta")))

    @torch.no_grad()
    def fill(self, modules: nn.Module, values: LayerValues) -> None:
        """Gives modules values.

        Args:
            modules: What :meth:`strip` has left, or a copy of the structure; changed in place.
            values: Of such modules, of the same names.
        """
        places = dict(_tensors_of(modules))
        for name, value in (*values.parameters.items(), *values.buffers.items()):
            place = places.get(name, value)  # a buffer may have come into being since
            _set(modules, name, self._once(place, partial(self._filled, value=value)))
        for name, parameter in modules.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(values.parameters[name].requires_grad)
            if name in values.gradients:
                parameter.grad = self._filled(parameter, values.gradients[name])
        for name, is_training in values.is_training.items():
            modules.get_submodule(name).training = is_training
        for name, state in values.extra_states.items():
            modules.get_submodule(name).set_extra_state(state)

    def _once(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if id(tensor) not in self._pairs:
            made = make(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            new = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
            self._pairs[id(tensor)] = (tensor, new)
        return self._pairs[id(tensor)][1]

    def _filled(self, place: Tensor, value: Tensor) -> Tensor:
        # Laid out as where the model was built, as if a checkpoint had been loaded.
        like = place if place.shape == value.shape and place.dtype == value.dtype else value
        return torch.empty_like(like.detach(), device=self._device).copy_(value)


def _tensors_of(modules: nn.Module) -> Sequence[tuple[str, Tensor]]:
    return [
        *modules.named_parameters(remove_duplicate=False),
        *modules.named_buffers(remove_duplicate=False),
    ]


def _set(modules: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, key = name.rpartition(".")
    owner = modules.get_submodule(path)
    # Not by `setattr`, which a class may have changed.
    held: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
    held[key] = tensor

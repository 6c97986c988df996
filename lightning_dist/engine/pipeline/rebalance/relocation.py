"""Move layers between the ranks of a pipeline while it is empty.

Each rank sends the layers that leave it, frees their values, and receives the layers that come, one
by one. Sends never wait, so no order of ranks can deadlock. The receiving rank has had a layer's
structure since the model was cut, so only values travel: parameters, buffers, gradients that wait
for an update, optimizer state, and what a training loop may have changed on one rank alone (frozen
parameters, ``training``, ``extra_state``). Modules stay the same objects, with their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.comms.links import PeerLinks
from lightning_dist.engine.planning.partition import find_moves
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.cut import recut, stage_of_layers, structure_of
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.tensors.patch import replacement


@dataclass(frozen=True, slots=True)
class LayerValues:
    """The values of some modules, as a tree that channels can send.

    Attributes:
        parameters: Parameters by name; trained ones require grad.
        buffers: Buffers by name.
        gradients: Gradients of the parameters, by name.
        is_training: ``training`` of all submodules, by name.
        extra_states: ``extra_state`` of the submodules that have one, by name.
        beside: Tensors that a layer uses besides its own values.
        optimizer: Optimizer state of the parameters by name. A count of steps is on the host, and
            arrives there.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    is_training: Mapping[str, bool]
    extra_states: Mapping[str, Any]
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def values_of(modules: nn.Module, *, with_gradients: bool) -> LayerValues:
    """Returns the values of modules, without a copy, and gradients that wait for an update."""
    parameters = dict(modules.named_parameters(remove_duplicate=False))
    gradients = {n: p.grad for n, p in parameters.items() if with_gradients and p.grad is not None}
    return LayerValues(
        parameters={
            name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()
        },
        buffers={name: b.detach() for name, b in modules.named_buffers(remove_duplicate=False)},
        gradients=gradients,
        is_training={name: part.training for name, part in modules.named_modules()},
        extra_states={
            name: part.get_extra_state()
            for name, part in modules.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        },
    )


class Exchanged:
    """Replaces tensors in modules; one that several places share stays shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id lasts

    def strip(self, modules: nn.Module) -> None:
        """Moves modules' tensors to the meta device, which frees their values."""
        for name, tensor in _tensors_of(modules):
            _set(modules, name, self._once(tensor, lambda t: torch.empty_like(t, device="meta")))

    @torch.no_grad()
    def fill(self, modules: nn.Module, values: LayerValues) -> None:
        """Fills modules after :meth:`strip`, or a copy of the structure, with values."""
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
            new = replacement(tensor, made) if isinstance(tensor, nn.Parameter) else made
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


class Relocation:
    """One rank's part in a change of the partition.

    ``shape`` is this rank's part of the pipeline, by which the module has been cut, and ``after``
    has the layers per stage afterwards.
    """

    def __init__(
        self, layers: Layers, shape: PipelineShape, after: tuple[int, ...], device: torch.device
    ) -> None:
        self.moves = find_moves(shape.layers_per_stage, after, shape.rank_of_stage)
        self._layers = layers
        self._after = after
        self._own_stages = shape.stages
        self._device = device
        self._leaving = [move for move in self.moves if move.source == shape.rank]
        self._coming = [move for move in self.moves if move.target == shape.rank]

    @property
    def targets(self) -> Collection[int]:
        """The ranks that get layers from this one."""
        return sorted({move.target for move in self._leaving})

    @property
    def sources(self) -> Collection[int]:
        """The ranks that send layers to this one."""
        return sorted({move.source for move in self._coming})

    @torch.no_grad()
    def run(
        self, links: PeerLinks, optimizers: Iterable[Optimizer], *, with_gradients: bool = False
    ) -> None:
        """Moves the layers; the pipeline must be empty, and detached from the module.

        The optimizers lose the state of the layers that leave, and get the state of the layers that
        come. The caller must update their groups.

        Args:
            links: Channels to :attr:`targets` and from :attr:`sources`.
            optimizers: Optimizers of this rank's parameters.
            with_gradients: Whether ``p.grad`` waits for an update.
        """
        states = [optimizer.state for optimizer in optimizers]
        for move in self._leaving:
            parcel = self._pack(move.layer_index, states, with_gradients)
            links.outgoing[move.target].send(parcel)
        self._forget(states)
        coming = {move.layer_index for move in self._coming}
        stages = enumerate(stage_of_layers(self._after))
        own = [layer for layer, stage in stages if stage in self._own_stages]
        # Before a wait that may raise, so that no layer without values stands in the module.
        recut(self._layers, self._after, [layer for layer in own if layer not in coming])
        exchanged, beside = Exchanged(self._device), dict[str, Tensor]()
        for move in self._coming:
            parcel = links.incoming[move.source].receive()
            self._unpack(move.layer_index, parcel, exchanged, states)
            beside.update(parcel.beside)
        recut(self._layers, self._after, own)
        self._layers.settle(own, beside)

    def _parts(self, layer_index: int) -> nn.ModuleDict:
        """Returns a layer's submodules as one module."""
        all_parts = self._layers.parts()
        parts = [structure_of(p.module) for p in all_parts if p.layer_index == layer_index]
        return nn.ModuleDict({str(place): module for place, module in enumerate(parts)})

    def _pack(self, layer_index: int, states: list[Any], with_gradients: bool) -> LayerValues:
        parts = self._parts(layer_index)
        of_optimizer = {
            f"{number}.{name}": dict(state[p])
            for name, p in parts.named_parameters()
            for number, state in enumerate(states)
            if p in state
        }
        values = values_of(parts, with_gradients=with_gradients)
        return replace(values, beside=self._layers.beside(layer_index), optimizer=of_optimizer)

    def _forget(self, states: list[Any]) -> None:
        exchanged = Exchanged(self._device)
        for move in self._leaving:
            parts = self._parts(move.layer_index)
            for parameter in parts.parameters():
                for state in states:
                    state.pop(parameter, None)
            exchanged.strip(parts)

    def _unpack(
        self, layer_index: int, parcel: LayerValues, exchanged: Exchanged, states: list[Any]
    ) -> None:
        parts = self._parts(layer_index)
        exchanged.fill(parts, parcel)
        parameters = dict(parts.named_parameters())
        for name, entries in parcel.optimizer.items():
            number, _, own_name = name.partition(".")
            # Copies, since received tensors lie in the channel's own memory.
            states[int(number)][parameters[own_name]] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }

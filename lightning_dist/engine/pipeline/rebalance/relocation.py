"""Move layers between the ranks of a pipeline while it is empty.

Each rank sends the layers that leave it, frees their values, and receives the layers that come, one
by one. Sends never wait, so no order of ranks can deadlock. The receiving rank has had a layer's
structure since the model was cut, so only values travel: parameters, buffers, gradients that wait
for an update, optimizer state, and what a training loop may have changed on one rank alone (frozen
parameters, ``training``, ``extra_state``). Modules stay the same objects, with their hooks.

As much as possible stays open. Channels, the recorder, the log, and the optimizer with its owner
outlive the change. Only the stages are created anew, on the layers that this rank has then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import ChannelEnds
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.planning.partition import Move, find_moves, layers_of_stages
from lightning_dist.engine.splitting.cut import recut, structure_of
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.tensors.module_tree import place_of
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
    held, key = place_of(modules, name)
    held[key] = tensor


class LayerExchange:
    """Sends layers from rank to rank of a pipeline.

    Args:
        ranks: Global ranks of the pipeline, in order.
        groups: Two gloo groups of these ranks for layers only: to later ranks, to earlier ranks.
        device: Device on which this rank computes.
        timeout_seconds: How long a rank waits for another.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._ranks = ranks
        self._groups = groups
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._links = ChannelEnds[int]()
        self._interruption: BaseException | None = None

    def run(
        self,
        pipeline: Pipeline,
        layers: Layers,
        after: tuple[int, ...],
        optimizers: Sequence[Optimizer],
        *,
        with_gradients: bool,
        on_moved: Callable[[], None],
    ) -> tuple[Move, ...]:
        """Moves the layers of a pipeline that is empty.

        The optimizers lose the state of the layers that leave, and get the state of the layers that
        come. The caller must update their groups.

        Args:
            pipeline: The pipeline.
            layers: The layers of all ranks.
            after: The layers per stage from now on.
            optimizers: Optimizers of this rank's parameters.
            with_gradients: Whether ``p.grad`` waits for an update.
            on_moved: Called when the layers have arrived, before the stages are created anew.

        Returns:
            The moves of all ranks of the pipeline.
        """
        shape = pipeline.shape
        moves = find_moves(shape.layers_per_stage, after, shape.rank_of_stage)
        leaving = {m.layer_index: m.target for m in moves if m.source == shape.rank}
        coming = {m.layer_index: m.source for m in moves if m.target == shape.rank}
        own = layers_of_stages(after, shape.stages)
        self._links = self._connect(sorted({*leaving.values()}), sorted({*coming.values()}))
        if self._interruption is not None:  # while the channels were opened, or before
            self._links.interrupt(self._interruption)
        states = [optimizer.state for optimizer in optimizers]
        with pipeline.detached():
            with torch.no_grad():
                self._send(layers, leaving, states, with_gradients)
                # Before a wait that may raise, so that no layer in the module lacks its values.
                recut(layers, after, [layer for layer in own if layer not in coming])
                beside = self._receive(layers, coming, states)
                recut(layers, after, own)
                layers.finish_cut(own, beside)
            pipeline.stages.repartition(after)
            on_moved()
        self._links.close()
        self._links = ChannelEnds[int]()
        return moves

    def _connect(self, targets: Sequence[int], sources: Sequence[int]) -> ChannelEnds[int]:
        """Opens this rank's channels. Collective: every rank of the pipeline must call it."""
        rank = self._ranks.index(dist.get_rank())
        later, earlier = self._groups
        outgoing = {
            peer: DistributedSender(later if peer > rank else earlier, self._ranks[peer])
            for peer in targets
        }
        incoming = {
            peer: DistributedReceiver(
                later if peer < rank else earlier,
                self._ranks[peer],
                self._device,
                self._timeout_seconds,
            )
            for peer in sources
        }
        return ChannelEnds(outgoing, incoming)

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in this rank's present or next wait for a layer."""
        self._interruption = error
        self._links.interrupt(error)

    def _send(
        self, layers: Layers, targets: Mapping[int, int], states: list[Any], with_gradients: bool
    ) -> None:
        """Sends layers to ranks, and frees their values."""
        for layer, target in targets.items():
            parts = _parts(layers, layer)
            of_optimizer = {
                f"{number}.{name}": dict(state[p])
                for name, p in parts.named_parameters()
                for number, state in enumerate(states)
                if p in state
            }
            values = values_of(parts, with_gradients=with_gradients)
            parcel = replace(values, beside=layers.beside(layer), optimizer=of_optimizer)
            self._links.outgoing[target].send(parcel)
        exchanged = Exchanged(self._device)
        for layer in targets:
            parts = _parts(layers, layer)
            for parameter in parts.parameters():
                for state in states:
                    state.pop(parameter, None)
            exchanged.strip(parts)

    def _receive(
        self, layers: Layers, sources: Mapping[int, int], states: list[Any]
    ) -> dict[str, Tensor]:
        """Receives layers from ranks; returns what they use besides their own values."""
        exchanged, beside = Exchanged(self._device), dict[str, Tensor]()
        for layer, source in sources.items():
            parcel = self._links.incoming[source].receive()
            parts = _parts(layers, layer)
            exchanged.fill(parts, parcel)
            parameters = dict(parts.named_parameters())
            for name, entries in parcel.optimizer.items():
                number, _, own_name = name.partition(".")
                # Copies, since received tensors lie in the channel's own memory.
                states[int(number)][parameters[own_name]] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                }
            beside.update(parcel.beside)
        return beside


def _parts(layers: Layers, layer_index: int) -> nn.ModuleDict:
    """Returns a layer's submodules as one module."""
    parts = [structure_of(p.module) for p in layers.parts() if p.layer_index == layer_index]
    return nn.ModuleDict({str(place): module for place, module in enumerate(parts)})

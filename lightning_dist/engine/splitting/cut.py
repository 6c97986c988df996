"""Removes other stages' layers from a module, and keeps all names.

The layers of other stages are replaced in place by :class:`RemoteLayer`, never re-indexed. So each
parameter keeps its name of a single device, and a state dict means the same under every layout. A
remote layer holds no parameters of its own: ``parameters()`` are this rank's. But it keeps the
shapes of the replaced layer, for code that must see the whole model: the summary, and
``configure_optimizers``, which decides the groups. A parameter that it shares with layers of this
rank is this rank's parameter in both, so tied parameters stay tied in the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.engine.planning.partition import layers_of_stages, stage_of_layers
from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.splitting.placed_parameters import placed_in
from lightning_dist.engine.splitting.remote_layer import RemoteLayer
from lightning_dist.engine.tensors.module_tree import set_attribute
from lightning_dist.engine.tensors.skeleton import skeleton_of


def cut(
    module: nn.Sequential | Layers, layers_per_stage: Sequence[int], own_stages: Collection[int]
) -> None:
    """Replaces the layers of all other stages; does nothing if the module has been cut so.

    Raises:
        ValueError: The module has been cut in another way before.
    """
    layers = layers_in(module)
    stages = stage_of_layers(layers_per_stage)
    was_cut = is_cut(layers.module)
    for part in layers.parts():
        is_remote = isinstance(part.module, RemoteLayer)
        if is_remote == (stages[part.layer_index] in own_stages) and was_cut:
            raise ValueError(
                f"This model has been cut before, and what stages {list(own_stages)} of the"
                f" partition {list(layers_per_stage)} have is not what this process kept: layer"
                f" {part.name!r} is {'elsewhere' if is_remote else 'here'}. Build the model"
                " anew and load a checkpoint to change the partition."
            )
    if not was_cut:
        _replace(layers, stages, own_stages)
    layers.finish_cut(layers_of_stages(layers_per_stage, own_stages), {})


def _replace(layers: Layers, stages: Sequence[int], own_stages: Collection[int]) -> None:
    kept = [part.module for part in layers.parts() if stages[part.layer_index] in own_stages]
    stand_ins: dict[int, Tensor] = {id(p): p for layer in kept for p in layer.parameters()}
    for part in layers.parts():
        stage = stages[part.layer_index]
        if stage not in own_stages:
            skeleton = skeleton_of(part.module, stand_ins)
            set_attribute(layers.module, part.name, RemoteLayer(skeleton, part.name, stage))


def recut(layers: Layers, layers_per_stage: Sequence[int], own_layers: Collection[int]) -> None:
    """Changes the cut of a module; no tensor is made or copied.

    Layers that leave this rank have no values by now, and layers that come have them already; see
    :mod:`.rebalance.relocation`.
    """
    stages = stage_of_layers(layers_per_stage)
    for part in layers.parts():
        stage, present = stages[part.layer_index], part.module
        if isinstance(present, RemoteLayer):
            present.stage_index = stage
            if part.layer_index in own_layers:
                set_attribute(layers.module, part.name, present.skeleton)
        elif part.layer_index not in own_layers:
            set_attribute(layers.module, part.name, RemoteLayer(present, part.name, stage))


def is_cut(module: nn.Module) -> bool:
    """Returns whether a layer in a module is on another rank."""
    return any(isinstance(layer, RemoteLayer) for layer in module.modules())


def layers_of(layers: Layers, layers_per_stage: Sequence[int], stage_index: int) -> nn.Module:
    """Returns the module that runs the layers of a stage of this rank."""
    first = sum(layers_per_stage[:stage_index])
    stage = layers.stage(first, first + layers_per_stage[stage_index])
    put_placed(layers, layers_per_stage, stage_index, stage)
    return stage


def put_placed(
    layers: Layers, layers_per_stage: Sequence[int], stage_index: int, stage: nn.Module
) -> None:
    """Puts what a stage of this rank has beside its layers into the module that runs these."""
    stages = stage_of_layers(layers_per_stage)
    for placed in layers.placed:
        if stages[layers.layer_of(placed)] == stage_index:
            placed.put_into(stage)


def structure_of(layer: nn.Module) -> nn.Module:
    """Returns a layer of this rank, or the structure of a remote layer."""
    return layer.skeleton if isinstance(layer, RemoteLayer) else layer


@contextmanager
def whole(module: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Returns a context manager in which remote layers are replaced by their structure.

    So are parameters that other stages have, though no layer holds them.

    Args:
        module: The pipelined module, or a module around it.
        device: Device of the structure's tensors. None leaves them on the meta device; on the CPU
            they take address space but no memory, as long as no code writes to them.
    """
    remote = remote_layers(module)
    stand_ins: dict[int, Tensor] = {id(p): p for p in module.parameters()}  # this rank's
    for holder, name, layer in remote:
        skeleton = layer.skeleton
        shown = skeleton if device is None else skeleton_of(skeleton, stand_ins, device)
        setattr(holder, name, shown)
    try:
        with ExitStack() as stack:
            for placed in placed_in(module):
                stack.enter_context(placed.as_empty(device))
            yield
    finally:
        for holder, name, layer in remote:
            setattr(holder, name, layer)


def remote_layers(module: nn.Module) -> list[tuple[nn.Module, str, RemoteLayer]]:
    """Lists the remote layers in a module, each with its parent module and its name there."""
    return [
        (holder, name, layer)
        for holder in module.modules()
        for name, layer in holder.named_children()
        if isinstance(layer, RemoteLayer)
    ]

"""Removes other stages' layers from a module, and keeps all names.

The layers of other stages are replaced in place by :class:`ForeignLayer`, never re-indexed. So each
parameter keeps its name of a single device, and a state dict means the same under every layout. A
foreign layer holds no parameters of its own: ``parameters()`` are this rank's. But it keeps the
shapes of the replaced layer, for code that must see the whole model: the summary, and
``configure_optimizers``, which decides the groups. A parameter that it shares with layers of this
rank is this rank's parameter in both, so tied parameters stay tied in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.layers import Layers, layers_in
from lightning_dist.engine.tensors.module_tree import set_attribute
from lightning_dist.engine.tensors.patch import replacement

Module = TypeVar("Module", bound=nn.Module)
_META = torch.device("meta")


@dataclass(eq=False, slots=True)
class Sight:
    """Whether walks through the modules include the descriptions of foreign layers.

    All layers of a model share one, for a step opens and closes it around each micro-batch.
    """

    is_open: bool = False


class ForeignLayer(nn.Module):
    """Stands for a layer of another rank.

    Args:
        skeleton: The structure of the replaced layer, with tensors on the meta device.
        name: The layer's name in the pipelined module.
        stage_index: The stage that has the layer.

    Attributes:
        skeleton: As above.
        described: The module that supplies the attributes of the layer: the result of
            :func:`.describe` while a pipeline runs, else the skeleton.
        compute_dtypes: The dtypes in which parameters of the skeleton compute on their own rank, by
            name; a parameter without an entry computes in its own dtype.
    """

    skeleton: nn.Module
    described: nn.Module

    def __init__(self, skeleton: nn.Module, name: str, stage_index: int) -> None:
        super().__init__()
        self.name = name
        self.stage_index = stage_index
        self.compute_dtypes: dict[str, torch.dtype] = {}
        vars(self)["skeleton"] = skeleton  # no submodule
        self.answer_by(skeleton, Sight())

    def imitation(self) -> nn.Module:
        """Returns a module that computes outputs like the layer's, on the meta device."""
        # For a shared parameter the skeleton has this rank's copy, with values, or a shard.
        stand_ins: dict[int, Tensor] = {}
        for name, p in self.skeleton.named_parameters():
            dtype = self.compute_dtypes.get(name, p.dtype)
            empty = torch.empty(p.shape, device="meta", dtype=dtype)
            stand_ins[id(p)] = nn.Parameter(empty, requires_grad=False)
        return skeleton_of(self.skeleton, stand_ins)

    def answer_by(self, description: nn.Module, sight: Sight) -> None:
        """Sets what supplies attributes of the layer, and whether it is seen."""
        vars(self)["described"], self._sight = description, sight

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute from the description, or raises an error that names the stage."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in dir(self.skeleton):
                raise
            if self.described is not self.skeleton:
                return getattr(self.described, name)
            raise AttributeError(
                f"{name!r} of layer {self.name!r} was asked for, but that layer lives on stage"
                f" {self.stage_index}, not on this rank. Use it where the layer runs only, or put"
                " both uses on one stage with `partition=`."
            ) from error

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Lists the modules of the layer's description while it is in sight; else none.

        ``parameters()``, ``modules()`` and ``buffers()`` of modules around the layer call this.
        """
        walk = super().named_modules
        if self._sight.is_open:
            walk = self.described.named_modules
        yield from walk(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Lists the layer's shared parameters, of which this rank has a copy, or the description's.

        Freezing this layer so freezes the copy. Modules around the layer list others.
        """
        if self._sight.is_open:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        for name, parameter in self.skeleton.named_parameters(prefix, recurse, remove_duplicate):
            if not parameter.is_meta:
                yield name, parameter

    def forward(self, *_: object, **__: object) -> Tensor:
        """Raises `ValueError`: the layer is on another rank."""
        raise ValueError(
            f"Layer {self.name!r} lives on stage {self.stage_index}, not on this rank. Call the"
            " whole pipelined module, not its layers one by one, and only inside training_step,"
            " validation_step, test_step or predict_step; for the whole model in one process load a"
            " checkpoint with `lightning_dist.checkpoint.load_full`."
        )


def skeleton_of(
    module: Module, stand_ins: dict[int, Tensor] | None = None, device: torch.device = _META
) -> Module:
    """Returns a copy of a module's structure, with tensors without values.

    Args:
        module: Any module; it is not changed.
        stand_ins: Replacements of some tensors, by the tensors' ids; new ones are added.
        device: The device of new tensors.
    """
    stand_ins = {} if stand_ins is None else stand_ins
    for parameter in module.parameters():
        if id(parameter) not in stand_ins:
            empty = torch.empty_like(parameter, device=device)
            stand_ins[id(parameter)] = replacement(parameter, empty)
    for buffer in module.buffers():
        if id(buffer) not in stand_ins:
            stand_ins[id(buffer)] = torch.empty_like(buffer, device=device)
    hooks: dict[int, object] = {}
    for name, held in ((n, h) for part in module.modules() for n, h in vars(part).items()):
        # With an autograd graph a tensor cannot be copied; `weight_norm` stores such a weight.
        if isinstance(held, Tensor) and held.grad_fn:
            stand_ins[id(held)] = torch.empty_like(held.detach(), device=device)
        elif name.endswith("_hooks") and isinstance(held, Mapping):  # methods of any objects
            hooks |= {id(hook): hook for hook in held.values()}
    try:  # deepcopy takes objects in its memo for copies
        return copy.deepcopy(module, {**stand_ins, **hooks})
    except TypeError as error:
        raise ValueError(
            f"A layer has something that cannot be copied: {error} (in {type(module).__name__})."
            " Other stages have copies of a layer, without its values. Make locks, files and the"
            " like where they are first used, or give their class a `__deepcopy__`."
        ) from error


def stage_of_layers(layers_per_stage: Sequence[int]) -> list[int]:
    """Returns the stage of each layer."""
    return [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]


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
        is_foreign = isinstance(part.module, ForeignLayer)
        if is_foreign == (stages[part.layer_index] in own_stages) and was_cut:
            raise ValueError(
                f"This model has been cut before, and what stages {list(own_stages)} of the"
                f" partition {list(layers_per_stage)} have is not what this process kept: layer"
                f" {part.name!r} is {'elsewhere' if is_foreign else 'here'}. Build the model"
                " anew and load a checkpoint to change the partition."
            )
    if was_cut:
        return
    kept = [part.module for part in layers.parts() if stages[part.layer_index] in own_stages]
    stand_ins: dict[int, Tensor] = {id(p): p for layer in kept for p in layer.parameters()}
    for part in layers.parts():
        stage = stages[part.layer_index]
        if stage not in own_stages:
            skeleton = skeleton_of(part.module, stand_ins)
            set_attribute(layers.module, part.name, ForeignLayer(skeleton, part.name, stage))


def recut(
    module: nn.Sequential | Layers, layers_per_stage: Sequence[int], own_layers: Collection[int]
) -> None:
    """Changes the cut of a module; no tensor is made or copied.

    Layers that leave this rank have no values by now, and layers that come have them already; see
    :mod:`.rebalance.layer_values`.
    """
    layers = layers_in(module)
    stages = stage_of_layers(layers_per_stage)
    for part in layers.parts():
        stage, present = stages[part.layer_index], part.module
        if isinstance(present, ForeignLayer):
            present.stage_index = stage
            if part.layer_index in own_layers:
                set_attribute(layers.module, part.name, present.skeleton)
        elif part.layer_index not in own_layers:
            set_attribute(layers.module, part.name, ForeignLayer(present, part.name, stage))


def is_cut(module: nn.Module) -> bool:
    """Returns whether a layer in a module is on another rank."""
    return any(isinstance(layer, ForeignLayer) for layer in module.modules())


def layers_of(
    module: nn.Sequential | Layers, layers_per_stage: Sequence[int], stage_index: int
) -> nn.Module:
    """Returns the module that runs the layers of a stage of this rank."""
    first = sum(layers_per_stage[:stage_index])
    return layers_in(module).stage(first, first + layers_per_stage[stage_index])


def layer_parameter_counts(module: nn.Sequential | Layers) -> list[int]:
    """Counts the parameters of each layer of a pipelined module, foreign layers included."""
    layers = layers_in(module)
    counts = [0] * len(layers)
    for part in layers.parts():
        counts[part.layer_index] += sum(p.numel() for p in structure_of(part.module).parameters())
    return counts


def structure_of(layer: nn.Module) -> nn.Module:
    """Returns a layer of this rank, or the structure of a foreign layer."""
    return layer.skeleton if isinstance(layer, ForeignLayer) else layer


@contextmanager
def whole(module: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Returns a context manager in which foreign layers are replaced by their structure.

    Args:
        module: The pipelined module, or a module around it.
        device: Device of the structure's tensors. None leaves them on the meta device; on the CPU
            they take address space but no memory, as long as no code writes to them.
    """
    foreign = foreign_layers(module)
    stand_ins: dict[int, Tensor] = {id(p): p for p in module.parameters()}  # this rank's
    for holder, name, layer in foreign:
        skeleton = layer.skeleton
        shown = skeleton if device is None else skeleton_of(skeleton, stand_ins, device)
        setattr(holder, name, shown)
    try:
        yield
    finally:
        for holder, name, layer in foreign:
            setattr(holder, name, layer)


def foreign_layers(module: nn.Module) -> list[tuple[nn.Module, str, ForeignLayer]]:
    """Lists the foreign layers in a module, each with its parent module and its name there."""
    return [
        (holder, name, layer)
        for holder in module.modules()
        for name, layer in holder.named_children()
        if isinstance(layer, ForeignLayer)
    ]

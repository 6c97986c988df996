"""Take a stage's layers out of a sequence, and leave the names as they were.

The layers of other stages are replaced in place by :class:`ForeignLayer`, never re-indexed, so each
parameter keeps the name that it has on a single device, and a state dict means the same under every
layout. A foreign layer holds no parameters of its own (``parameters()`` is this rank's), but it
remembers the shape of what it replaced, for those who must see the whole model: the summary, and
``configure_optimizers``, which decides the groups. A parameter that it shares with layers of this
rank stays that parameter there, so what was tied is tied in the whole model too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class ForeignLayer(nn.Module):
    """Stands for a layer that lives on another rank.

    Args:
        layer: The layer that it replaces.
        name: Its name in the sequence.
        stage_index: The stage that has it.
        stand_ins: As for :func:`skeleton_of`.
    """

    def __init__(
        self, layer: nn.Module, name: str, stage_index: int, stand_ins: dict[int, Tensor]
    ) -> None:
        super().__init__()
        self.name = name
        self.stage_index = stage_index
        # In a tuple, where nn.Module does not look for submodules.
        self._skeleton = (skeleton_of(layer, stand_ins),)

    @property
    def skeleton(self) -> nn.Module:
        """The layer's structure, its tensors on the meta device."""
        return self._skeleton[0]

    def forward(self, *_: object, **__: object) -> Tensor:
        """Refuses.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"Layer {self.name!r} lives on stage {self.stage_index}, not on this rank. Call the"
            " whole `nn.Sequential`, not its layers one by one, and only inside training_step,"
            " validation_step, test_step or predict_step; for the whole model in one process load a"
            " checkpoint with `lightning_dist.checkpoint.load_full`."
        )


def skeleton_of(module: Module, stand_ins: dict[int, Tensor] | None = None) -> Module:
    """Copies a module's structure, with its tensors on the meta device.

    Args:
        module: Any; is left as it is.
        stand_ins: What to take in place of some tensors, by their ids; gets those that are made.
    """
    return _copy_with(module, {} if stand_ins is None else stand_ins, torch.device("meta"))


def _copy_with(module: Module, stand_ins: dict[int, Tensor], device: torch.device) -> Module:
    for parameter in module.parameters():
        if id(parameter) not in stand_ins:
            empty = torch.empty_like(parameter, device=device)
            stand_ins[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in module.buffers():
        if id(buffer) not in stand_ins:
            stand_ins[id(buffer)] = torch.empty_like(buffer, device=device)
    # What deepcopy finds in its memo it takes for a copy.
    return copy.deepcopy(module, dict[int, object](stand_ins))


def stage_of_layers(layers_per_stage: Sequence[int]) -> list[int]:
    """Gives the stage of each layer.

    Args:
        layers_per_stage: The partition.
    """
    return [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]


def cut(
    sequence: nn.Sequential, layers_per_stage: Sequence[int], own_stages: Collection[int]
) -> None:
    """Replaces the layers of all other stages; does nothing where that was done before.

    Args:
        sequence: The pipelined module; changed in place.
        layers_per_stage: The partition.
        own_stages: The stages to keep.

    Raises:
        ValueError: The sequence has been cut in another way before.
    """
    stages = stage_of_layers(layers_per_stage)
    children = list(sequence.named_children())
    for (name, layer), stage in zip(children, stages, strict=True):
        if isinstance(layer, ForeignLayer) == (stage in own_stages) and is_cut(sequence):
            raise ValueError(
                f"This model has been cut before, and what stages {list(own_stages)} of the"
                f" partition {list(layers_per_stage)} have is not what this process kept: layer"
                f" {name!r} is"
                f" {'elsewhere' if isinstance(layer, ForeignLayer) else 'here'}. Build the model"
                " anew and load a checkpoint to change the partition."
            )
    if is_cut(sequence):
        return
    kept = [c for (_, c), stage in zip(children, stages, strict=True) if stage in own_stages]
    stand_ins: dict[int, Tensor] = {id(p): p for layer in kept for p in layer.parameters()}
    for (name, layer), stage in zip(children, stages, strict=True):
        if stage not in own_stages:
            setattr(sequence, name, ForeignLayer(layer, name, stage, stand_ins))


def is_cut(sequence: nn.Sequential) -> bool:
    """Whether a layer of the sequence lives on another rank."""
    return any(isinstance(layer, ForeignLayer) for layer in sequence.children())


def layers_of(
    sequence: nn.Sequential, layers_per_stage: Sequence[int], stage_index: int
) -> nn.Sequential:
    """Gives the layers of a stage, as one module that runs them.

    Args:
        sequence: The pipelined module; the stage's layers are on this rank.
        layers_per_stage: The partition.
        stage_index: The stage.
    """
    stages = stage_of_layers(layers_per_stage)
    pairs = zip(sequence.named_children(), stages, strict=True)
    return nn.Sequential(OrderedDict(named for named, stage in pairs if stage == stage_index))


def layer_parameter_counts(sequence: nn.Sequential) -> list[int]:
    """Counts the parameters of each layer, foreign ones included.

    Args:
        sequence: The pipelined module, cut or not.
    """
    return [sum(p.numel() for p in structure(layer).parameters()) for layer in sequence.children()]


def structure(layer: nn.Module) -> nn.Module:
    """Gives a layer, or what is known of it here if it lives on another rank.

    Args:
        layer: Of a pipelined module, cut or not.
    """
    return layer.skeleton if isinstance(layer, ForeignLayer) else layer


@contextmanager
def whole(sequence: nn.Sequential, device: torch.device | None = None) -> Iterator[None]:
    """Puts the structure of the foreign layers in their places for a while.

    Args:
        sequence: The pipelined module.
        device: Where their tensors pretend to be. None leaves them on the meta device; on the CPU
            they take address space but no memory, for nobody writes to them.

    Yields:
        Nothing.
    """
    foreign = {n: m for n, m in sequence.named_children() if isinstance(m, ForeignLayer)}
    stand_ins: dict[int, Tensor] = {id(p): p for p in sequence.parameters()}  # this rank's
    for name, layer in foreign.items():
        skeleton = layer.skeleton
        shown = skeleton if device is None else _copy_with(skeleton, stand_ins, device)
        setattr(sequence, name, shown)
    try:
        yield
    finally:
        for name, layer in foreign.items():
            setattr(sequence, name, layer)


def foreign_state_names(sequence: nn.Sequential) -> set[str]:
    """Names what other stages hold, as in the sequence's state dict.

    Args:
        sequence: The pipelined module.
    """
    return {
        f"{name}.{key}"
        for name, layer in sequence.named_children()
        if isinstance(layer, ForeignLayer)
        for key in layer.skeleton.state_dict()
    }

"""Stands for a layer of another rank: its structure, and its description while a pipeline runs.

In the description, submodules, settings and methods are as they were when the model was cut. Its
tensors are remote tensors (:mod:`.tensors.remote_tensor`). So are the attributes that its forward
writes: their initial values would be wrong numbers on this rank.

While a user's step runs, walks through the model include the descriptions. Without them, a step
that adds up the norms of ``self.parameters()``, or the losses that layers have left in
``self.modules()``, would silently add up this rank's only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.forward_ast import written_by_forward
from lightning_dist.engine.tensors.module_tree import dotted
from lightning_dist.engine.tensors.remote_tensor import absent, absent_value
from lightning_dist.engine.tensors.skeleton import skeleton_of

_READ_THERE = (
    "Use it where the layer runs only, or put both uses on one stage with `partition=`; or let"
    " layers='trace' see to what is used where. Let other weights follow these, as a teacher's, in"
    " `on_train_batch_end`, by name."
)
_RETURN_IT = (
    "What a layer's forward leaves in an attribute does not travel: let it return the value, with"
    " its activations."
)


class RemoteLayer(nn.Module):
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
        is_listed: Whether walks through the modules list the description's.
    """

    skeleton: nn.Module
    described: nn.Module
    is_listed = False

    def __init__(self, skeleton: nn.Module, name: str, stage_index: int) -> None:
        super().__init__()
        self.name = name
        self.stage_index = stage_index
        self.compute_dtypes: dict[str, torch.dtype] = {}
        vars(self)["skeleton"] = skeleton  # no submodule
        self.register_load_state_dict_pre_hook(_leave_to_its_rank)  # type: ignore[no-untyped-call]
        self.set_description(skeleton)

    def meta_copy(self) -> nn.Module:
        """Returns a module that computes outputs like the layer's, on the meta device."""
        # For a shared parameter the skeleton has this rank's copy, with values, or a shard.
        stand_ins: dict[int, Tensor] = {}
        for name, p in self.skeleton.named_parameters():
            dtype = self.compute_dtypes.get(name, p.dtype)
            empty = torch.empty(p.shape, device="meta", dtype=dtype)
            stand_ins[id(p)] = nn.Parameter(empty, requires_grad=False)
        return skeleton_of(self.skeleton, stand_ins)

    def set_description(self, description: nn.Module) -> None:
        """Sets the module that supplies attributes of the layer."""
        vars(self)["described"] = description

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

    def __getitem__(self, key: Any) -> Any:
        """Returns an entry of a layer that is a sequence or a list, as it does attributes."""
        return self.__getattr__("__getitem__")(key)

    def __len__(self) -> int:
        """Returns the length of a layer that is a sequence or a list."""
        return len(self.skeleton)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Returns whether the layer is true: without this, `__len__` would be asked."""
        return bool(self.skeleton)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Lists the modules of the layer's description while it is listed; else none.

        ``parameters()``, ``modules()`` and ``buffers()`` of modules around the layer call this.
        """
        walk = super().named_modules
        if self.is_listed:
            walk = self.described.named_modules
        yield from walk(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Lists the layer's shared parameters, of which this rank has a copy, or the description's.

        Freezing this layer so freezes the copy. Modules around the layer list others.
        """
        if self.is_listed:
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


def _leave_to_its_rank(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes the layer's values out of a whole state that is loaded."""
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def describe(layer: RemoteLayer, device: torch.device) -> nn.Module:
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
                setattr(part, name, absent_value(_reason(layer, dotted(path, name), _RETURN_IT)))
    return description


def _is_data(part: nn.Module, name: str) -> bool:
    """Returns whether an attribute is data of the part or its class, and not of ``nn.Module``."""
    if name in vars(nn.Module()):
        return False
    try:
        return not hasattr(inspect.getattr_static(part, name), "__get__")
    except AttributeError:
        return False


def _reason(layer: RemoteLayer, name: str, fix: str) -> str:
    return (
        f"The value of {name!r} of layer {layer.name!r} was asked for, but that layer lives on"
        f" stage {layer.stage_index}, not on this rank. {fix}"
    )

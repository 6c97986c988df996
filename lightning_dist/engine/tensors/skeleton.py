"""Copies of modules and tensors without values, for code that looks at their structure only.

Such a copy stands for a layer of another rank. On the meta device it takes no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import replacement

Module = TypeVar("Module", bound=nn.Module)
_META = torch.device("meta")


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
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = without_values(tensor, device)
    kept: dict[int, object] = {}
    for name, held in ((n, h) for part in module.modules() for n, h in vars(part).items()):
        # With an autograd graph a tensor cannot be copied; `weight_norm` stores such a weight.
        if isinstance(held, Tensor) and held.grad_fn:
            stand_ins[id(held)] = torch.empty_like(held.detach(), device=device)
        elif name.endswith("_hooks") and isinstance(held, Mapping):  # methods of any objects
            kept |= {id(hook): hook for hook in held.values()}
        elif isinstance(held, dist.ProcessGroup):  # of a SyncBatchNorm
            kept[id(held)] = held
    try:  # deepcopy takes objects in its memo for copies
        return copy.deepcopy(module, {**stand_ins, **kept})
    except TypeError as error:
        raise ValueError(
            f"A layer has something that cannot be copied: {error} (in {type(module).__name__})."
            " Other stages have copies of a layer, without its values. Make locks, files and the"
            " like where they are first used, or give their class a `__deepcopy__`."
        ) from error


def without_values(tensor: Tensor, device: torch.device | str = _META) -> Tensor:
    """Returns an empty tensor like another one, which may be a parameter, on a device."""
    empty = torch.empty_like(tensor, device=device)
    return replacement(tensor, empty) if isinstance(tensor, nn.Parameter) else empty

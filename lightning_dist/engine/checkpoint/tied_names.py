"""Tied parameters in checkpoints: several names, one tensor.

On one device a tied parameter is one tensor with several names in a state dict, and has one entry
in the optimizer's state. If two ranks hold a copy each, under different names, a checkpoint must
still have one. So a tensor is written under the parameter's *first name* in the whole model. The
other names are listed beside it, and are restored when the checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_KEY = "tied_names"

FirstNames = Mapping[str, str]
"""First names of tied parameters, by each of their other names."""


def first_names(module: nn.Module) -> dict[str, str]:
    """Returns the first names of the parameters that have several names in the whole model."""
    firsts: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    pairs = [(name, firsts.setdefault(id(parameter), name)) for name, parameter in every]
    return {name: first for name, first in pairs if name != first}


def fold(
    checkpoint: Mapping[str, Any], sections: Iterable[str], firsts: FirstNames
) -> dict[str, Any]:
    """Returns a checkpoint, of the whole model or a part, with one name for each tied parameter."""
    if not firsts:
        return dict(checkpoint)
    folded: dict[str, Any] = {key: {} for key in sections if key in checkpoint}
    for key, state in folded.items():
        for name, value in checkpoint[key].items():
            state.setdefault(firsts.get(name, name), value)  # a part may have several of the names
    return {**checkpoint, **folded, _KEY: dict(firsts)}


def unfold(checkpoint: dict[str, Any], sections: Iterable[str]) -> None:
    """Restores all names of each tied parameter, on one tensor; undoes :func:`fold` in place."""
    firsts = checkpoint.pop(_KEY, {})
    for key in checkpoint.keys() & set(sections):
        state = checkpoint[key]
        state.update({name: state[first] for name, first in firsts.items() if first in state})


def with_other_names(checkpoint: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the other names of tied parameters by first name, from a result of :func:`fold`."""
    others: dict[str, list[str]] = {}
    for name, first in checkpoint.get(_KEY, {}).items():
        others.setdefault(first, []).append(name)
    return others

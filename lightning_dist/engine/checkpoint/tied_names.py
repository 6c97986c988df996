"""Tied parameters in checkpoints: several names, one tensor.

On one device a tied parameter is one tensor with several names in a state dict, and has one entry
in the optimizer's state. Where two ranks hold a copy each, and know it by different names, a
checkpoint still shall have one. So what is written bears the *first name* that the whole model has
for the parameter, and the others are listed beside it, to be put back when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_KEY = "tied_names"

FirstNames = Mapping[str, str]
"""First names of tied parameters by their other ones."""


def first_names(module: nn.Module) -> dict[str, str]:
    """Finds the parameters that have several names.

    Args:
        module: The whole model.
    """
    firsts: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    pairs = [(name, firsts.setdefault(id(parameter), name)) for name, parameter in every]
    return {name: first for name, first in pairs if name != first}


def fold(
    checkpoint: Mapping[str, Any], sections: Iterable[str], firsts: FirstNames
) -> dict[str, Any]:
    """Leaves one name to each tied parameter.

    Args:
        checkpoint: A Lightning checkpoint dictionary, of the whole model or of a part; stays.
        sections: Keys of its state dicts.
        firsts: Of the whole model.
    """
    if not firsts:
        return dict(checkpoint)
    folded = {key: _folded(checkpoint[key], firsts) for key in sections if key in checkpoint}
    return {**checkpoint, **folded, _KEY: dict(firsts)}


def unfold(checkpoint: dict[str, Any], sections: Iterable[str]) -> None:
    """Gives each tied parameter all of its names again, on one tensor.

    Args:
        checkpoint: What :func:`fold` has made; is changed.
        sections: As for :func:`fold`.
    """
    firsts = checkpoint.pop(_KEY, {})
    for key in checkpoint.keys() & set(sections):
        state = checkpoint[key]
        state.update({name: state[first] for name, first in firsts.items() if first in state})


def with_other_names(checkpoint: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the other names of what a checkpoint has by its first name.

    Args:
        checkpoint: What :func:`fold` has made.
    """
    others: dict[str, list[str]] = {}
    for name, first in checkpoint.get(_KEY, {}).items():
        others.setdefault(first, []).append(name)
    return others


def _folded(state: Mapping[str, Any], firsts: FirstNames) -> dict[str, Any]:
    folded: dict[str, Any] = {}
    for name, value in state.items():
        folded.setdefault(firsts.get(name, name), value)  # a part may have several of the names
    return folded

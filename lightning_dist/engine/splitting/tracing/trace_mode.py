"""What a graph has built in of the module that it was traced from.

A forward reads more than parameters, buffers and arguments: whether a part is in training, the rate
of a dropout, a number that the user raises from epoch to epoch. A graph holds them as they were. So
graphs go by these values, and when one has changed, another graph is due.
"""

from __future__ import annotations

from typing import Any

from torch import nn

Mode = tuple[tuple[Any, ...], ...]
"""Names and values of each part's attributes, in the order of ``modules()``."""


def mode_of(module: nn.Module) -> Mode:
    """Gives the numbers, strings and flags of a module's parts, private ones left out.

    Args:
        module: Any.
    """
    return tuple(_public(part) for part in module.modules())


def set_mode(module: nn.Module, mode: Mode) -> None:
    """Makes the parts of a copy like those of the original.

    Args:
        module: Of the same structure.
        mode: Of the original.
    """
    for part, attributes in zip(module.modules(), mode, strict=True):
        for name in _public(part)[::2]:
            del part.__dict__[name]
        part.__dict__.update(zip(attributes[::2], attributes[1::2], strict=True))


def changed_attributes(module: nn.Module, mode: Mode) -> list[str]:
    """Names the attributes that are not what they were.

    Args:
        module: Any.
        mode: What they were.
    """
    pairs = zip(module.named_modules(), mode, strict=True)
    return [
        f"{path}.{name}" if path else name
        for (path, part), attributes in pairs
        for name, _ in set(_items(_public(part))) ^ set(_items(attributes))
    ]


def _public(part: nn.Module) -> tuple[Any, ...]:
    """Gives names and values in turns; as flat as can be, for it is done at each call."""
    return tuple(
        entry
        for item in part.__dict__.items()
        if type(item[1]) in _BUILT_IN and item[0][0] != "_"
        for entry in item
    )


def _items(attributes: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return list(zip(attributes[::2], attributes[1::2], strict=True))


_BUILT_IN = frozenset({bool, int, float, str, type(None)})

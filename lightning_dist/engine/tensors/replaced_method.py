"""A method of one object that is another one for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def replace_method(owner: object, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one object.

    The object may have one of its own already, which hides that of its class: a user's, or what an
    earlier call has left.

    Args:
        owner: Changed until the returned function is called.
        name: Of the method.
        method: Called in its place, without the object.

    Returns:
        Undoes the change.
    """
    if name in vars(owner):
        undo = partial(setattr, owner, name, vars(owner)[name])
    else:
        undo = partial(delattr, owner, name)
    setattr(owner, name, method)
    return undo

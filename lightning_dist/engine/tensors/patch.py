"""The hooks of modules and parameters, and the replacement of a method of one object.

No public function lists a module's or a tensor's hooks, or removes them without their handles. So
this module uses four private names of torch. No other module uses them, and tests of the callers
fail if they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

Undo: TypeAlias = Callable[[], None]
"""Undoes a change; returned by the function that makes the change."""


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns a module's forward hooks and forward pre-hooks, as dicts that may be changed."""
    return module._forward_hooks, module._forward_pre_hooks


def gradient_hooks_of(
    parameter: Tensor,
) -> tuple[tuple[Callable[[Tensor], Any], ...], tuple[Callable[[Tensor], None], ...]]:
    """Returns the hooks of ``register_hook``, and of ``register_post_accumulate_grad_hook``."""
    before, behind = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple((before or {}).values()), tuple((behind or {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def note_on(parameter: Tensor) -> tuple[dict[str, Any], Any]:
    """Returns the attributes and hooks that users have put on a parameter."""
    return dict(vars(parameter)), parameter._backward_hooks


def put_on(parameter: Tensor, noted: tuple[dict[str, Any], Any]) -> None:
    """Puts attributes and hooks on a parameter; handles of the hooks stay valid.

    Args:
        parameter: Another parameter, or the same one again.
        noted: The result of :func:`note_on`.
    """
    attributes, hooks = noted
    vars(parameter).update(attributes)
    if hooks is not None:
        parameter._backward_hooks = hooks


@contextmanager
def kept_on_parameters(module: nn.Module) -> Iterator[None]:
    """Returns a context manager that keeps the attributes and hooks of a module's parameters.

    ``Module.to`` swaps a ``DTensor`` for another one, without the attributes and hooks.

    Args:
        module: The module that is moved inside the context manager.
    """
    noted = [(parameter, note_on(parameter)) for parameter in module.parameters()]
    yield
    for parameter, own in noted:
        put_on(parameter, own)


def replace_method(owner: object, name: str, method: Callable[..., Any]) -> Undo:
    """Replaces a method of one object.

    If the object has such an attribute of its own already, a user's or an earlier call's, the
    undo restores it.

    Args:
        owner: The object, changed until the returned function is called.
        name: Name of the method.
        method: The replacement, called without the object.
    """
    if name in vars(owner):
        undo = partial(setattr, owner, name, vars(owner)[name])
    else:
        undo = partial(delattr, owner, name)
    setattr(owner, name, method)
    return undo

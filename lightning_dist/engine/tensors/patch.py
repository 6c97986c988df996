"""The hooks around a module's forward.

No public function lists a module's hooks, or a tensor's, or removes them without their handles.
Four private names of torch, here and nowhere else; tests of the callers fail when they change.

A method of one object that is another one for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Gives those behind the forward of a module itself, and those before it; to be changed, too.

    Args:
        module: Any.
    """
    return module._forward_hooks, module._forward_pre_hooks


def gradient_hooks_of(
    parameter: Tensor,
) -> tuple[tuple[Callable[[Tensor], Any], ...], tuple[Callable[[Tensor], None], ...]]:
    """Gives the hooks of ``register_hook``, and of ``register_post_accumulate_grad_hook``.

    Args:
        parameter: Any leaf.
    """
    before, behind = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple((before or {}).values()), tuple((behind or {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Tells whether any hook waits for a parameter's gradient.

    Args:
        parameter: Any leaf.
    """
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def note_on(parameter: Tensor) -> tuple[dict[str, Any], Any]:
    """Gives what users have put on a parameter: attributes, for groups of an optimizer, and hooks.

    Args:
        parameter: Any.
    """
    return dict(vars(parameter)), parameter._backward_hooks


def put_on(parameter: Tensor, noted: tuple[dict[str, Any], Any]) -> None:
    """Puts it on another one, or on the same one anew; handles of hooks stay good.

    Args:
        parameter: Any.
        noted: What :func:`note_on` gave.
    """
    attributes, hooks = noted
    vars(parameter).update(attributes)
    if hooks is not None:
        parameter._backward_hooks = hooks


@contextmanager
def kept_on_parameters(module: nn.Module) -> Iterator[None]:
    """Keeps what users have put on parameters.

    ``Module.to`` swaps a ``DTensor`` for another one, which has none of it.

    Args:
        module: Is moved inside.

    Yields:
        Nothing.
    """
    noted = [(parameter, note_on(parameter)) for parameter in module.parameters()]
    yield
    for parameter, own in noted:
        put_on(parameter, own)


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

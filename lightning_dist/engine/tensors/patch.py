"""The hooks of modules and parameters, and replacements: of a method, of modules' tensors.

No public function lists a module's or a tensor's hooks, or removes them without their handles. So
this module uses four private names of torch. No other module uses them, and tests of the callers
fail if they change.

A parameter's hooks are run here on its whole gradient where autograd computes partial gradients.
Autograd would run the hooks for each micro-batch, and on each stage's part of a tied parameter's
gradient. If a stage computes with other versions of its weights, autograd would run none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import is_dtensor

Undo: TypeAlias = Callable[[], None]
"""Undoes a change; returned by the function that makes the change."""

Entry: TypeAlias = tuple[dict[str, Any], str, Any]
"""A dict, a key of it, and another value for the key."""


class TracedHook(partial[Any]):
    """A forward hook that graphs need not call: they have been traced with it."""


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


UserState: TypeAlias = tuple[dict[str, Any], Any, Any]
"""Attributes and both kinds of hooks that users have put on a parameter."""


def user_state(parameter: Tensor) -> UserState:
    """Returns the attributes and hooks that users have put on a parameter."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return dict(vars(parameter)), *hooks


def set_user_state(parameter: Tensor, state: UserState) -> None:
    """Puts the result of :func:`user_state` on a parameter; handles of the hooks stay valid."""
    attributes, before, behind = state
    vars(parameter).update(attributes)
    if before is not None:
        parameter._backward_hooks = before
    if behind is not None:
        parameter._post_accumulate_grad_hooks = behind


def replacement(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Returns a parameter with another value, and the attributes and hooks of the first.

    A parameter of a derived class is replaced without them: it may keep its values there.
    """
    made = nn.Parameter(value, parameter.requires_grad)
    if type(parameter) is nn.Parameter or is_dtensor(parameter):
        set_user_state(made, user_state(parameter))
    return made


@contextmanager
def user_state_kept(module: nn.Module) -> Iterator[None]:
    """Returns a context manager that keeps the attributes and hooks of a module's parameters.

    ``Module.to`` swaps a ``DTensor`` for another one, without the attributes and hooks.
    """
    states = [(parameter, user_state(parameter)) for parameter in module.parameters()]
    yield
    for parameter, state in states:
        set_user_state(parameter, state)


@contextmanager
def replaced(entries: Sequence[Entry]) -> Iterator[None]:
    """Replaces entries of dicts while the context manager is entered.

    The dicts are those of modules' parameters and buffers. ``setattr`` would change the order of
    the parameters, and ``torch.func.functional_call`` would look each name up anew.
    """
    before = [own[key] for own, key, _ in entries]
    for own, key, value in entries:
        own[key] = value
    try:
        yield
    finally:
        for (own, key, _), value in zip(entries, before, strict=True):
            own[key] = value


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


def surround_method(
    owner: object,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Undo:
    """Calls functions before and after a method of one object; see :func:`replace_method`."""
    own = getattr(owner, name)

    @wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = own(*args, **kwargs)
        if after is not None:
            after()
        return result

    return replace_method(owner, name, method)


@torch.no_grad()
def add_gradient(gradient: Tensor, total: Tensor) -> Tensor:
    """Adds a gradient to a total, in place where torch can; returns the sum."""
    if total.is_sparse and not gradient.is_sparse:  # torch adds in the other order only
        return gradient.to(total.dtype).add(total)
    return total.add_(gradient)


@torch.no_grad()
def add_with_hooks(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to ``parameter.grad`` as autograd does, and runs the parameter's hooks."""
    before, behind = gradient_hooks_of(parameter)
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed.clone()
    total = parameter.grad
    parameter.grad = gradient if total is None else add_gradient(gradient, total)
    for hook in behind:
        hook(parameter)


def with_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Returns a gradient after the parameter's hooks; ``parameter.grad`` stays.

    Args:
        parameter: The parameter whose hooks run.
        gradient: The parameter's gradient for an update; may be changed in place.
    """
    installed, parameter.grad = parameter.grad, None
    try:
        add_with_hooks(parameter, gradient)
        return parameter.grad
    finally:
        parameter.grad = installed

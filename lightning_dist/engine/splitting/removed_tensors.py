"""Removes tensors from a module whose parts stay in place.

A traced module is not cut between its children, but between operations, and what a step uses behind
the pipelined module is no child of that. A part with parameters on another stage stays in place: it
keeps its training mode, and the order of names is the same on all ranks. Only its tensors are
removed. Their shapes are kept, for code that must see the whole model: the summary, and
``configure_optimizers``, which decides the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.tensors.module_tree import place_of
from lightning_dist.engine.tensors.remote_tensor import absent
from lightning_dist.engine.tensors.skeleton import without_values


class RemovedTensors:
    """Parameters and buffers of a module that other ranks hold; none at first.

    Args:
        module: The module.
        value: Error text, with ``{name!r}``, for a read of a removed tensor's value in a step.
        call: For a call of a part that lacks a tensor; None leaves its forward as it is.
    """

    def __init__(self, module: nn.Module, value: str, call: str | None = None) -> None:
        self._module = module
        self._value, self._call = value, call
        self._places: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        self._shapes: dict[str, Tensor] = {}
        self._described: dict[str, Tensor] = {}
        self._load_hooks: list[RemovableHandle] = []

    def take(self, names: Collection[str]) -> None:
        """Removes tensors; of a tied one all names are given."""
        if not names:
            return  # hooks stay the same objects, for code that restores a module's attributes
        places = {name: place_of(self._module, name) for name in names}
        by_identity: dict[int, Tensor] = {}
        for name, (tensors, key) in places.items():
            tensor = tensors[key]
            assert tensor is not None
            self._shapes[name] = by_identity.setdefault(id(tensor), without_values(tensor))
        for tensors, key in places.values():
            tensors[key] = None
        self._places |= places
        self._skip_in_loads()
        self._refuse_calls({name.rpartition(".")[0] for name in names} - {""})

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Restores tensors, a tied one under all names, which are this rank's from now on."""
        if not values:
            return
        for name, tensor in values.items():
            tensors, key = self._places.pop(name)
            del self._shapes[name]
            tensors[key] = tensor
        self._skip_in_loads()
        still_away = {name.rpartition(".")[0] for name in self._places}
        for name in {name.rpartition(".")[0] for name in values} - still_away - {""}:
            vars(self._module.get_submodule(name)).pop("forward", None)

    def _refuse_calls(self, names: Collection[str]) -> None:
        if self._call is None:
            return
        for name in names:
            refused: Callable[..., Any] = partial(_refuse, self._call.format(name=name))
            self._module.get_submodule(name).forward = refused

    def _skip_in_loads(self) -> None:
        """Takes the removed tensors out of a whole state that is loaded."""
        for hook in self._load_hooks:
            hook.remove()
        self._load_hooks = []
        for name in self._places:
            holder, _, key = name.rpartition(".")
            part = self._module.get_submodule(holder)
            self._load_hooks.append(part.register_load_state_dict_pre_hook(partial(_skip, key)))

    @property
    def names(self) -> set[str]:
        """The names of the removed tensors."""
        return set(self._places)

    def as_empty(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Returns a context manager with tensors of the same shapes in place.

        Args:
            device: Device of these tensors. None leaves them on the meta device; on the CPU they
                take address space but no memory, as long as no code writes to them.
        """
        made = {id(s): without_values(s, device or "meta") for s in self._shapes.values()}
        return self._in_place({name: made[id(shape)] for name, shape in self._shapes.items()})

    def describe(self, device: torch.device) -> None:
        """Makes the remote tensors that :meth:`as_remote` shows, as if they were on a device."""
        self._described = {
            name: absent(shape, shape.dtype, device, self._value.format(name=name))
            for name, shape in self._shapes.items()
        }

    def as_remote(self) -> AbstractContextManager[None]:
        """Returns a context manager with remote tensors in place; a read of a value is an error."""
        return self._in_place(self._described)

    @contextmanager
    def _in_place(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        for name, (tensors, key) in self._places.items():
            tensors[key] = values[name]
        try:
            yield
        finally:
            for tensors, key in self._places.values():
                tensors[key] = None


def _skip(key: str, part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.pop(prefix + key, None)


def _refuse(text: str, *_: object, **__: object) -> NoReturn:
    raise ValueError(text)

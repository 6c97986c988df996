"""Proves sharded layers again at their first calls, with the arguments that they are given.

Before a run it is not known with which arguments a module will be called: a mask, a scale, the
distances of positions. With each it may compute something else. So before a first call with
arguments of new kinds, in either mode, a copy of the module is run whole and in parts with these
arguments (:mod:`.plan.proof`), some samples and positions of them, on the CPU. All ranks are given
arguments of the same kinds, and find the same. Later calls are only looked up.

The activation is random, for the first one may be zeros. So is a mask that is the same everywhere.
A module that cannot be run with its arguments, such as the rank's own keys of earlier positions,
is warned of.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dist.engine.tensor_parallel.layers.sequence import SEQUENCE_DIM
from lightning_dist.engine.tensor_parallel.plan.proof import LayerComparison, Sharding, prove
from lightning_dist.engine.tensor_parallel.plan.regions import Styles
from lightning_dist.engine.tensor_parallel.plan.trial_run import (
    Trial,
    in_type,
    kind_of,
    on_the_side,
)
from lightning_dist.engine.tensor_parallel.plan.verify import advice, is_too_large, shardings
from lightning_dist.engine.tensors.skeleton import skeleton_of
from lightning_dist.engine.tensors.tree import flatten, tensors_in, unflatten

_SAMPLES, _POSITIONS = 2, 64
_LARGEST = 2**22  # elements of an activation that a trial may take

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Kind:
    """Modules with the same computation."""

    skeleton: nn.Module  # one of them before it was sharded, without values
    calls: set[Hashable] = field(default_factory=set)  # kinds that need no proof any more


class FirstCalls:
    """The modules around the regions of a model, each proven at its first calls.

    Args:
        module: The model, before it is sharded; may be on the meta device.
        styles: Styles by module name, in the order of the model.
        tp_size: Number of ranks.
        parts: Into how many parts the sequence is cut between the regions.
        is_kept: Returns whether this rank keeps the module of a name.
    """

    def __init__(
        self,
        module: nn.Module,
        styles: Styles,
        tp_size: int,
        *,
        parts: int = 1,
        is_kept: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._module = module
        self._parts = parts
        self._watched: list[tuple[Sharding, _Kind]] = []
        kinds: dict[Hashable, _Kind] = {}
        for sharding in shardings(module, styles, tp_size):
            holder = module.get_submodule(sharding.name)
            if is_too_large(holder, sharding) or not is_kept(sharding.name):
                continue
            key = (*kind_of(holder), *sharding.styles)
            if key not in kinds:
                try:
                    kinds[key] = _Kind(skeleton_of(holder, {id(b): b for b in holder.buffers()}))
                except Exception:  # noqa: BLE001  (the user's code, which may not be copied)
                    continue
            self._watched.append((sharding, kinds[key]))

    def watch(self) -> None:
        """Begins to watch the calls, once the model is sharded."""
        for sharding, kind in self._watched:
            self._watch(sharding, kind)

    def _watch(self, sharding: Sharding, kind: _Kind) -> None:
        # Never traced: it has effects beside its result, and compiled code divides here anyway.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def note_call(holder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = (holder.training, _kind_of_value((args, kwargs)))
            # Tensors of a dry run, of another class, have no values to be tried.
            if call not in kind.calls and all(map(_is_plain, tensors_in((args, kwargs)))):
                self._prove(sharding, kind, (args, kwargs), training=holder.training)
                kind.calls.add(call)

        holder = self._module.get_submodule(sharding.name)
        holder.register_forward_pre_hook(note_call, with_kwargs=True)

    def _prove(self, sharding: Sharding, kind: _Kind, call: _Call, *, training: bool) -> None:
        def trials_of(copy: nn.Module, dtype: torch.dtype) -> Iterator[Trial]:
            bound = inspect.signature(copy.forward).bind(*call[0], **call[1])
            return _trials((bound.args, bound.kwargs), self._parts, dtype)

        compare = partial(LayerComparison, sharding)
        with on_the_side():
            finding = prove(kind.skeleton, trials_of, compare, training=training)
        given = ", ".join(_words(call))
        if not finding.is_proven:
            warnings.warn(
                f"It is not proven that {sharding.label}, a {type(kind.skeleton).__name__}, may be"
                " cut: a copy of it could not be run on the CPU, in float64 or float32, with some"
                f" samples of what it is called with: {given}. Its layers are cut by their names"
                " and sizes; compare the first losses with those of one device.",
                stacklevel=2,
            )
        if finding.mismatch is not None:
            raise ValueError(
                f"{advice(sharding, finding.mismatch)} (With plan='auto', pass the other layers,"
                " which trainer.strategy.describe() lists, as plan={...}. A copy with random"
                f" weights was run whole and as tp_size={sharding.tp_size} parts, with what it is"
                f" first called with: {given}.)"
            )


def _trials(call: _Call, parts: int, dtype: torch.dtype) -> Iterator[Trial]:
    """Lists a call with some samples and positions, with all positions, and whole."""
    tensors, skeleton = flatten(call)
    activation = tensors[0].shape
    samples = {activation[0]: _SAMPLES}
    positions = dict.fromkeys(activation[1:-1][:1], _POSITIONS)
    seen: list[list[torch.Size]] = []
    for most in ({**samples, **positions}, samples, {}):
        fewer = {tensor: _first(tensor, most) for tensor in tensors}
        shapes = [tensor.shape for tensor in fewer.values()]
        if shapes in seen or fewer[tensors[0]].numel() > _LARGEST:
            continue
        seen.append(shapes)
        tried = {tensor: _usable(part, dtype) for tensor, part in fewer.items()}
        x, *others = (tried[tensor] for tensor in tensors)
        given = partial(_fill_in, [x, *others], skeleton)
        if not x.is_floating_point():
            yield Trial(x, given)
            continue
        # It may be a part of the sequence, beside a mask of all of it.
        for times in dict.fromkeys((1, parts)) if x.dim() > SEQUENCE_DIM + 1 else (1,):
            whole = x if times == 1 else x.repeat_interleave(times, SEQUENCE_DIM)
            yield Trial(torch.randn_like(whole), given)


def _fill_in(tensors: list[Tensor], skeleton: Any, x: Tensor) -> Any:
    """Returns a user's arguments, with an activation in the place of the first tensor."""
    copies = [x if t is tensors[0] else t.clone() for t in tensors]
    with _GraphsLeft():
        return unflatten(copies, deepcopy(skeleton))


class _GraphsLeft(TorchFunctionMode):
    """Lets deep copies take tensors that autograd made, as a cache of keys holds them.

    Without it torch refuses them.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Copies the values alone."""
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _first(tensor: Tensor, most: Mapping[int, int]) -> Tensor:
    """Returns the first samples and positions of a tensor, found by their numbers."""
    for dim, size in enumerate(tensor.shape):
        if most.get(size, size) < size:
            tensor = tensor.narrow(dim, 0, most[size])
    return tensor


def _usable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    usable = in_type(tensor.detach().cpu(), dtype).clone()
    is_flat = usable.is_floating_point() and usable.numel() > 1
    if is_flat and bool((usable == usable.flatten()[0]).all()):
        return torch.rand_like(usable)  # zeros, say, would hide what is done with them
    return usable


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _kind_of_value(value: Any) -> Hashable:
    """Returns a key that is equal for values with which code seems to do the same."""
    if isinstance(value, Tensor):
        kind = "float" if value.is_floating_point() else value.dtype
        return kind, *(size == 1 for size in value.shape)
    if isinstance(value, bool | str | Enum | None):
        return value
    if isinstance(value, int | float):  # 0 and 1 often mean nothing to add or to scale
        return type(value), value if value in (0, 1) else None
    if isinstance(value, Mapping):
        return (type(value), *((key, _kind_of_value(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), *map(_kind_of_value, value))
    return cast(Hashable, type(value))


def _words(call: _Call) -> Iterator[str]:
    named = [("", value) for value in call[0]] + [(f"{k}=", v) for k, v in call[1].items()]
    for name, value in named:
        is_plain = isinstance(value, bool | int | float | str | None)
        text = repr(value) if is_plain else type(value).__name__
        yield f"{name}{text}{list(value.shape) if isinstance(value, Tensor) else ''}"

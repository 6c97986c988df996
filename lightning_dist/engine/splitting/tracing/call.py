"""The arguments of a traced module's calls: an example for the trace, and the calls after it.

A graph is made for one structure of arguments. Sizes of tensors are left open if the forward leaves
them open, and other values are constants of the graph. So each later call is bound to the forward's
own parameters, as the example was, and compared with the example: a graph would run on an input of
another kind without an error, and return another result than the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, is_concrete_int
from torch.utils import _pytree as pytree

_ALIKE = "Call it alike in all steps, and make `example_input_array`, if there is one, like that"
_RECURRENT = (
    " torch.export also fixes the length that nn.LSTM, nn.GRU and nn.RNN get: with one of them, pad"
    " all batches to one length."
)


class CallKey(NamedTuple):
    """The key by which a call's graph is chosen.

    Attributes:
        left_out: The paths of the leaves that are None.
        small_sizes: The sizes of 0 and 1: the path of a tensor, the dim and the size.
        autocast: The dtype of the autocast on the device of the first tensor; None for none.
    """

    left_out: tuple[str, ...]
    small_sizes: tuple[tuple[str, int, int], ...]
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
        arguments: All arguments by the forward's parameters, defaults included.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    arguments: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """The arguments' leaves by their paths, in the order of a trace's inputs."""
        pairs, _ = pytree.tree_flatten_with_path(self.arguments)
        return {_name(path): leaf for path, leaf in pairs}

    @property
    def batch_size(self) -> int | None:
        """The number of samples, from the first tensor with dims; None if there is none."""
        sizes = [t.shape[0] for t in self.leaves.values() if _has_dims(t)]
        return sizes[0] if sizes else None

    @property
    def key(self) -> CallKey:
        """The key of the call, under the present autocast."""
        tensors = {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, Tensor)}
        sizes = ((n, dim, size) for n, t in tensors.items() for dim, size in enumerate(t.shape))
        device = next(t.device.type for t in tensors.values())
        is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return CallKey(
            left_out=tuple(name for name, leaf in self.leaves.items() if leaf is None),
            small_sizes=tuple((name, dim, size) for name, dim, size in sizes if size < 2),
            autocast=torch.get_autocast_dtype(device) if is_on else None,
        )


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns arguments in the form in which calls can be compared.

    Raises:
        ValueError: The forward does not take the arguments.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"The arguments do not go with `forward{signature}`: {error}. `example_input_array` is"
            " a tensor, a tuple of positional arguments or a dict of named ones."
        ) from None
    bound.apply_defaults()
    again = signature.bind(*bound.args, **bound.kwargs)  # without empty *args and **kwargs
    return Call(dict(again.arguments), bound.args, bound.kwargs)


def example_of(signature: inspect.Signature, call: Call) -> Call:
    """Returns a call that a graph can be traced with.

    A trace takes a size of 1 for a constant, so a batch of one sample becomes one of two.

    Raises:
        ValueError: The call has no tensor with dims.
    """
    if call.batch_size is None:
        raise ValueError(
            "The example input has no tensor with samples in dim 0. Give one to"
            " `example_input_array`."
        )
    if call.batch_size > 1:
        return call

    def doubled(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if _has_dims(leaf) and leaf.shape[0] == 1 else leaf

    args, kwargs = pytree.tree_map(doubled, (call.args, call.kwargs))
    return bind(signature, args, kwargs)


class CallCheck:
    """Compares calls with the traced call."""

    def __init__(self, program: ExportedProgram, example: Call) -> None:
        self._leaves = example.leaves
        self._sizes = fixed_sizes(program, example)
        # Expressions of `L`, a mapping from parameters of the forward to arguments, that must be
        # true. Private, without a public counterpart: `ExportedProgram.module()` asserts them.
        guards = getattr(program, "_guards_code", [])
        self._guards = [(guard, compile(guard, "<guard>", "eval")) for guard in guards]
        self._known: set[tuple[Any, ...]] = set()

    def check(self, call: Call) -> list[Any]:
        """Returns a call's leaves, in the order of the graph's inputs.

        Raises:
            ValueError: The graph is not made for the call.
        """
        leaves = call.leaves
        if leaves.keys() != self._leaves.keys():
            raise ValueError(
                f"The traced module was called with {list(leaves)}, but traced with"
                f" {list(self._leaves)}. {_ALIKE}."
            )
        kind = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves.values())
        if kind not in self._known:
            for name, leaf in leaves.items():
                self._check_leaf(name, leaf)
            named = dict(call.arguments)
            for guard, code in self._guards:
                if not eval(code, {**SYMPY_INTERP, "inf": float("inf")}, {"L": named}):
                    raise ValueError(
                        f"A call of the traced module has sizes for which its graph is not made:"
                        f" {guard} is wrong. Where its forward does something else then, an"
                        f" `example_input_array` of such sizes would trace that.{_RECURRENT}"
                    )
            self._known.add(kind)
        return list(leaves.values())

    def _check_leaf(self, name: str, leaf: Any) -> None:
        expected = self._leaves[name]
        if not isinstance(expected, Tensor) or not isinstance(leaf, Tensor):
            if type(leaf) is not type(expected) or leaf != expected:
                raise ValueError(
                    f"{name}={leaf!r} in a call of the traced module, but {expected!r} in the"
                    f" example: what is no tensor is built into the graph. {_ALIKE}, or pass a"
                    " tensor."
                )
            return
        sizes = self._sizes[name]
        fits = len(sizes) == leaf.dim() and all(
            size in (None, actual) for size, actual in zip(sizes, leaf.shape, strict=True)
        )
        if not fits or leaf.dtype != expected.dtype:
            shape = ", ".join("any" if size is None else str(size) for size in sizes)
            raise ValueError(
                f"{name} has shape {tuple(leaf.shape)} and {leaf.dtype} in a call of the traced"
                f" module, whose graph takes ({shape}) and {expected.dtype}. {_ALIKE}.{_RECURRENT}"
            )


def fixed_sizes(program: ExportedProgram, call: Call) -> dict[str, tuple[int | None, ...]]:
    """Returns the sizes of a traced call's tensors, by their paths; None for open sizes."""
    return {
        name: tuple(int(size) if is_concrete_int(size) else None for size in value.shape)
        for name, value in zip(call.leaves, input_values(program), strict=True)
        if isinstance(value, Tensor)
    }


def input_values(program: ExportedProgram) -> list[Any]:
    """Returns the trace's value for each leaf of the call."""
    placeholders = program.graph.find_nodes(op="placeholder")
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    pairs = zip(placeholders, kinds, strict=True)
    return [node.meta.get("val") for node, kind in pairs if kind == "USER_INPUT"]


def _name(path: Sequence[Any]) -> str:
    return f"{path[0].key}{pytree.keystr(tuple(path[1:]))}"


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0

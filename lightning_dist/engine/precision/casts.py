"""The casts of inputs to the precision in which a module computes, and of its parameters.

The hooks read the dtype of a layer's present weights, not a switch. So inputs also fit when a layer
is recomputed in a backward, or called outside of a step, where no copies replace the parameters.

All casts are operations of the autograd graph, so a backward leaves fp32 gradients on the
parameters, where DistributedDataParallel and optimizers expect them. A parameter that is used
several times is cast once. Its gradient is summed in half precision, as with half weights.

A traced graph runs a module's operations and does not call its submodules, so a hook cannot cast
their inputs. So the casts are traced too, of a structure with half-precision weights and the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.tensors.patch import TracedHook, hooks_of, replaced
from lightning_dist.engine.tensors.tree import map_tensors, tensors_in


class HalfCasts:
    """The hooks that cast inputs and outputs in a user's module.

    Args:
        root: The user's module, already cut into stages and sharded.
        half: Chooses the modules that compute in half precision.
    """

    def __init__(self, root: nn.Module, half: HalfPrecision) -> None:
        self._handles: list[RemovableHandle] = []
        kept = half.kept(root)
        entries = dict(half.entries(root))
        for module in entries.values():
            self._cast_input(module, half.dtype)
        for module in root.modules():
            if module is not root and _dtype_of_weights(module) is not None:
                self._cast_input(module, None)
        for name, module in kept.items():
            self._cast_input(module, torch.float32)
            is_inside = any(name.startswith(f"{entry}.") for entry in entries)
            if is_inside and not half.is_loss(name, module):
                self._cast_output(module, half.dtype)
        for module in entries.values() if half.keeps_loss else ():
            self._cast_output(module, torch.float32)

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _cast_input(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        hook = TracedHook(_cast_arguments, dtype)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _cast_output(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._handles.append(module.register_forward_hook(TracedHook(_cast_result, dtype)))


# The hooks are partial functions of these, not closures: modules are pickled.


def _cast_arguments(
    dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    dtype = dtype or _dtype_of_weights(module)
    assert dtype is not None
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_result(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast(output, dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a tree; returns the tree itself if none differs."""

    def is_other(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != dtype

    if not any(is_other(tensor) for tensor in tensors_in(tree)):
        return tree
    return map_tensors(lambda t: t.to(dtype) if is_other(t) else t, tree)


def _dtype_of_weights(module: nn.Module) -> torch.dtype | None:
    own = module.parameters(recurse=False)
    floats = (p.dtype for p in own if p.is_floating_point() and p.ndim)  # a number suits any dtype
    return next(floats, None)


Copies = Mapping[nn.Parameter, Tensor]
"""The tensor that replaces each parameter."""


def half_copies(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> Copies:
    """Casts master parameters, in the autograd graph if gradients are enabled."""
    return {parameter: parameter.to(dtype) for parameter in parameters}


@contextmanager
def swapped_parameters(module: nn.Module, copies: Copies) -> Iterator[None]:
    """Swaps a module's parameters for copies while the context manager is entered.

    ``torch.func.functional_call`` does that for one call of the module. A Lightning step is no call
    of the module, nor is its backward, in which activations may be recomputed. No other code may
    read the module's parameters meanwhile; optimizers and reducers hold them by themselves.

    Args:
        module: The module, of any depth; a shared parameter is swapped everywhere.
        copies: Copies by parameter; copies of other modules' parameters are ignored.
    """
    entries = [
        (part._parameters, name, copies[parameter])
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in copies
    ]
    with replaced(entries):
        yield


@dataclass(frozen=True, slots=True)
class TracedCasts:
    """Makes a structure compute in the precision that a part of the user's module has in a step.

    Attributes:
        half: Chooses the modules that compute in half precision.
        path: Dotted name of the part in the user's module; empty for the whole module.
    """

    half: HalfPrecision
    path: str

    def __call__(self, structure: nn.Module) -> None:
        """Casts the structure's weights and adds the hooks that cast inputs."""
        root = _placed(structure, self.path)
        for parameter in self.half.half_parameters(root).values():
            parameter.data = parameter.data.to(self.half.dtype)
        HalfCasts(root, self.half)
        for hooks in hooks_of(structure):  # the part's own hooks run around the graph
            hooks.clear()


@contextmanager
def as_in_step(module: nn.Module, half: HalfPrecision) -> Iterator[None]:
    """Returns a context manager in which a module computes in half precision, as in steps."""
    casts = HalfCasts(module, half)
    try:
        copies = half_copies(half.half_parameters(module).values(), half.dtype)
        with swapped_parameters(module, copies):
            yield
    finally:
        casts.remove()


def _placed(part: nn.Module, path: str) -> nn.Module:
    # The rule reads dotted names.
    for name in reversed(path.split(".") if path else []):
        outer = nn.Module()
        outer.add_module(name, part)
        part = outer
    return part

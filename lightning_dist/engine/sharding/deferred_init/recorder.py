"""The dispatch mode that puts a constructor's operations onto a tape.

The mode sits below autograd and sees each operation on tensors, from any caller. An operation runs
on meta tensors for the shapes of its results, and is recorded. Four kinds run for real, too:
random operations, whose generator must advance; operations whose result is a value (``item``, and
with it ``if`` and ``nonzero``); operations that write to a real tensor; and collectives, of values
or of objects, whose results are recorded as constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Private by its path alone: torch's own notes on extending it import the class from here, and there
# is no other way to see operations below autograd.
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_dist.engine.sharding.deferred_init.tape import Operation, Reference, Tape
from lightning_dist.engine.tensors.tree import flatten, map_tensors, tensors_in

CPU = torch.device("cpu")
META = torch.device("meta")
_aten = torch.ops.aten

# These do not read the tensor that they write to.
_FILLS = frozenset(
    {
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
    }
)
_COLLECTIVES = ("c10d", "_c10d_functional")
FIX = (
    "Build the model in `__init__` instead of `configure_model`, or pass meta_init=False to the"
    " strategy."
)


class Recorder(TorchDispatchMode):
    """Puts each operation on meta tensors onto a tape.

    Args:
        tape: The tape.
        only_shapes: Whether random values are not needed, and are not drawn.

    Attributes:
        tape: The tape.
        aside: Whether operations are not recorded: our own, and those on tensors that the
            constructor itself makes on the meta device.
    """

    def __init__(self, tape: Tape, *, only_shapes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._only_shapes = only_shapes
        self.aside = False

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Returns a context manager in which operations are not recorded."""
        before, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = before

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.aside:
            return func(*args, **kwargs)
        with self.set_aside():
            tensors = tensors_in((args, kwargs))
            foreign = [t for t in tensors if t.is_meta and not self.tape.knows(t)]
            deferred = any(map(self.tape.knows, tensors))
            if deferred and foreign:
                raise ValueError(
                    f"{func} mixes a tensor made with device='meta' with others. Leave the device"
                    " out; nothing is allocated yet."
                )
            made = not foreign and kwargs.get("device") == META
            # Such a call changes the tensor, not its bytes; a storage grows when it is referred to.
            is_view = torch.Tag.inplace_view in func.tags
            if is_view or not (deferred or made):
                return func(*args, **kwargs)
            if func.namespace in _COLLECTIVES:
                return self._communicate(func, args, kwargs)
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written):
            if any(tensor.is_meta for tensor in written):
                raise ValueError(
                    f"{func} writes to tensors of which some are made from data and others are"
                    f" deferred. {FIX}"
                )
            args, kwargs = map_tensors(self.value, (args, kwargs))
            return func(*args, **kwargs)
        operation = self._operation(func, args, kwargs, written)
        real = None
        if operation.generator is not None and self._only_shapes:
            torch.rand((), generator=operation.generator)  # the next draw must differ
        elif operation.generator is not None:  # only to advance the generator
            real = self.tape.run_now(operation, keep=False)
        try:
            returned = func(*on_meta(args), **on_meta(kwargs))
        except RuntimeError:  # needs values, or is a mistake that is raised again here
            if real is None:
                real = self.tape.run_now(operation, keep=operation.generator is None)
            returned = _stand_in(func, real, written, kwargs)
        self._append(operation, returned)
        return returned

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a collective on the values of deferred tensors, and records what it has written."""
        deferred = [t for t in tensors_in((args, kwargs)) if self.tape.knows(t)]
        values = {id(tensor): self.value(tensor).clone() for tensor in deferred}
        args, kwargs = map_tensors(lambda t: values.get(id(t), t), (args, kwargs))
        returned = func(*args, **kwargs)
        for work in returned if isinstance(returned, tuple) else ():
            if isinstance(work, torch.ScriptObject):  # else another thread may still write
                work.wait()  # type: ignore[attr-defined]
        for tensor in deferred:
            self._record(_aten.copy_.default, (tensor, values[id(tensor)]), {})
        return returned

    def value(self, tensor: Tensor) -> Tensor:
        """Returns the values that a tensor has at this point of the constructor."""
        return self.tape.value(tensor) if self.tape.knows(tensor) else tensor

    def _operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Operation:
        if kwargs.get("device") == META:
            kwargs = {**kwargs, "device": CPU}
        tensors, skeleton = flatten((args, kwargs))
        inputs = tuple(self.tape.refer(t) if t.is_meta else constant(t) for t in tensors)
        looked_at = inputs[1:] if func in _FILLS and _covers_storage(tensors[0]) else inputs
        generator = _generator(func, args, kwargs)
        return Operation(
            func,
            skeleton,
            inputs,
            reads=frozenset(i.storage for i in looked_at if isinstance(i, Reference)),
            writes=frozenset(self.tape.refer(tensor).storage for tensor in written),
            default_dtype=torch.get_default_dtype(),
            generator=generator,
            generator_state=None if generator is None else generator.get_state(),
        )

    def _append(self, operation: Operation, returned: Any) -> None:
        tensors = tensors_in(returned)
        if any(tensor.is_meta and not self.tape.knows(tensor) for tensor in tensors):
            results = tuple(self.tape.refer(tensor) for tensor in tensors)
            writes = operation.writes | {result.storage for result in results}
            operation = dataclasses.replace(operation, results=results, writes=writes)
        if operation.writes:  # neither a view nor a look
            self.tape.append(operation)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    # The schema of an operation has no public name; torch's own modes read it here.
    arguments = func._schema.arguments
    given = {
        argument.name: value for argument, value in zip(arguments, args, strict=False)
    } | kwargs
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([given.get(name) for name in changed])


def _generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
    return given[0] if given else torch.default_generator


def _covers_storage(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and num_bytes == tensor.untyped_storage().nbytes()


def _stand_in(func: Any, real: Any, written: list[Tensor], kwargs: dict[str, Any]) -> Any:
    """Returns the result that the constructor gets for a computed one."""
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if kwargs.get("device") not in (None, META):  # the caller may read a CPU tensor's bytes
        return real
    if any(tensor.layout != torch.strided for tensor in tensors_in(real)):
        raise ValueError(f"{func} makes a tensor that is not strided. {FIX}")
    return on_meta(real)


def constant(tensor: Tensor) -> Tensor:
    """Returns a copy of a real tensor, for the constructor may change it before the replay."""
    return tensor.detach().clone()


def on_meta(tree: Any) -> Any:
    """Returns a tree with meta tensors for the real ones."""

    def twin(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)

    return map_tensors(twin, tree)

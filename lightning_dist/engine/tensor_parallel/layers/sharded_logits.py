"""Sharded logits, in a user's step that treats them as a plain tensor.

The head returns a ``DTensor`` over the vocabulary. torch's ``loss_parallel`` makes
``F.cross_entropy`` compute the loss from the shards; the whole logits never exist. A closed list
has the torch functions that get sharded logits: they treat each element by itself, or change the
shape, and keep the vocabulary dim. Other functions get gathered logits, for a ``DTensor`` promises
less than a tensor: ``.item()`` of its mean is one rank's own, and torch's ``loss_parallel``
differentiates each ``log_softmax`` as if it were a cross-entropy's. After a write, the logits stay
gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dist.engine.tensors.dtensor import local_part, whole
from lightning_dist.engine.tensors.tree import map_tensors

# Names of functions and of methods, with two operands only where the other is a number.
_SCALE = ("add", "sub", "mul", "div", "true_divide", "neg", "tanh")
_COPY = ("clone", "detach", "contiguous", "to", "float", "double", "half", "bfloat16")
_SHAPE = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand")
_TURN = ("transpose", "permute", "movedim", "swapaxes")
_TAKE = ("narrow", "select", "chunk", "split", "unbind")
_TELL = ("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "__len__")
_PROPERTY = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf")
# FSDP2 checks whether a unit's output is a view, and hooks into it.
_WATCH = ("register_hook",)
_WATCHED = ("_base",)
# An attribute, for these tensors come and go within a step, and parameters are DTensors, too.
_MARK = "_lightning_dist_logits"
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


_KNOWN = frozenset(
    getattr(holder, name)
    for name in (*_SCALE, *_COPY, *_SHAPE, *_TURN, *_TAKE, *_TELL, *_WATCH)
    for holder in (Tensor, torch)
    if hasattr(holder, name)
)
_PROPERTIES = frozenset(getattr(Tensor, name).__get__ for name in (*_PROPERTY, *_WATCHED))


def mark(logits: DTensor) -> DTensor:
    """Marks a tensor as sharded logits."""
    setattr(logits, _MARK, True)
    return logits


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, _MARK)


def _takes_shards(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(isinstance(part, int | slice | EllipsisType | None) for part in index)
    return func in _KNOWN or func in _PROPERTIES


def _keep_sharded(before: Tensor, result: Any) -> bool:
    """Marks a function's results as sharded logits, if they keep the vocabulary dim."""
    found = _tensors_in((result,))
    if any(_sharded_size(tensor) != _sharded_size(before) for tensor in found):
        return False
    for tensor in found:
        setattr(tensor, _MARK, True)
    return True


def _takes_shards_as_loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether torch can compute a cross-entropy from sharded logits."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs).arguments
    logits, targets = given["input"], given["target"]
    classes = Shard(min(logits.dim() - 1, 1))
    return (
        _is_sharded(logits)
        and logits.placements == (classes,)
        and not _is_sharded(targets)
        and not targets.is_floating_point()
        and not given.get("label_smoothing")
        and given.get("weight") is None  # torch's backward fails at ignored targets (2.13)
    )


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or func is Tensor.__setitem__ or bool(kwargs.get("inplace"))


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    # Only lists are opened, for this runs at each operation of a step.
    parts = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return [part for part in chain.from_iterable(parts) if isinstance(part, Tensor)]


def _sharded_size(tensor: Tensor) -> int | None:
    """Returns the size of a tensor's sharded dim; None without a plain shard."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return tensor.shape[placement.dim] if type(placement) is Shard else None


_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class ShardedLogits(TorchFunctionMode):
    """The function mode for a step with sharded logits; it sees each torch function call.

    Attributes:
        is_active: Whether a step runs in the mode. Heads return sharded logits only then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_active = False
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def __enter__(self) -> ShardedLogits:
        self.is_active = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.is_active = False
        self._written.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function with sharded or gathered logits.

        Raises:
            ValueError: The logits have been written to, and an argument is another view of them.
        """
        named = kwargs or {}
        if func in _DIFFERENTIATE:
            return _differentiate(func, args, named)
        tensors = _tensors_in((*args, *named.values()))
        if not any(map(_is_sharded, tensors)):
            return func(*args, **named)
        if self._written:
            args, named = map_tensors(self._newest, (args, named))
            tensors = _tensors_in((*args, *named.values()))
        if func is F.cross_entropy and _takes_shards_as_loss(args, named):
            with loss_parallel():
                return joined(func(*args, **named)).clone()  # FSDP2 wants no view of a step
        if all(map(_is_sharded, tensors)) and _takes_shards(func, args):
            with suppress(RuntimeError):  # a `DTensor` has no such view; the whole may have
                result = func(*args, **named)
                if _keep_sharded(tensors[0], result):
                    return result
        if _writes(func, named) and _is_sharded(args[0]):
            return self._write(func, args, named)
        args, named = map_tensors(_gather, (args, named))
        return func(*args, **named)

    def _write(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        logits, *others = args
        copy = whole(logits).clone()  # autograd refuses a write into the gathered tensor
        self._written[id(logits)] = (logits, copy)
        others, named = map_tensors(_gather, (others, named))
        return func(copy, *others, **named)

    def _newest(self, tensor: Tensor) -> Tensor:
        if not _is_sharded(tensor):
            return tensor
        if id(tensor) in self._written:
            return self._written[id(tensor)][1]
        places = {_storage(logits) for logits, _ in self._written.values()}
        if _storage(tensor) in places:
            raise ValueError(
                "With loss_parallel=True the step has written into logits, and then used another"
                " view of the same logits, which would not see it. Write into a copy"
                " (`logits = logits.clone()`), and use that from then on."
            )
        return tensor


def joined(tree: Any) -> Any:
    """Gathers the sharded tensors of a tree. Collective: every rank must call it."""
    return map_tensors(whole, tree)


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    place = 4 if func is torch.autograd.grad else 3
    if named.get("create_graph", any(args[place : place + 1])):
        raise ValueError(
            "With loss_parallel=True a loss cannot have gradients in it (create_graph=True):"
            " torch's parallel cross-entropy is differentiable once only. Leave loss_parallel out."
        )
    with loss_parallel():
        found = func(*args, **named)
    if func is torch.autograd.grad:  # gradients of sharded logits are sharded, too
        for source, gradient in zip(_tensors_in(args[1:2]), found, strict=True):
            if _is_sharded(source) and gradient is not None:
                _keep_sharded(source, gradient)
    return found


def _gather(tensor: Tensor) -> Tensor:
    return whole(tensor) if _is_sharded(tensor) else tensor


def _storage(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()

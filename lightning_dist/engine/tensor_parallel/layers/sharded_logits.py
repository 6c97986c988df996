"""Logits that each rank has a part of, under a step that does not know.

The head leaves its output apart, as a ``DTensor`` over the vocabulary. torch's ``loss_parallel``
makes ``F.cross_entropy`` compute the loss from the parts; the whole logits exist nowhere, forward
or backward. On the way there the step may shape and scale them
(:mod:`.layers.apart`). Whatever else it does with them, an accuracy say, or another
loss, gets them joined. What writes into them joins them for good.

What of torch may see logits of which each rank has a part: a closed list.

Everything else gets them joined, for a ``DTensor`` promises less than a tensor: ``.item()`` of its
mean is one rank's own, and torch's ``loss_parallel`` differentiates each ``log_softmax`` as if it
were a cross-entropy's. What is here treats each element by itself, or changes the shape, and leaves
the vocabulary in one piece.
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
# FSDP2 looks whether what its units return is a view, and hooks into it.
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
    """Notes that a tensor is logits that are apart.

    Args:
        logits: They are.
    """
    setattr(logits, _MARK, True)
    return logits


def is_apart(tensor: Tensor) -> bool:
    """Tells whether a tensor is logits that are apart.

    Args:
        tensor: Any.
    """
    return hasattr(tensor, _MARK)


def takes_parts(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a function does with each rank's part what it does with the whole.

    Args:
        func: Of torch.
        args: Its arguments; the first is apart, and so is each tensor in them.
    """
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(isinstance(part, int | slice | EllipsisType | None) for part in index)
    return func in _KNOWN or func in _PROPERTIES


def keep_sharded(before: Tensor, result: Any) -> bool:
    """Marks what a function has made of logits, if the vocabulary is in one piece still.

    Args:
        before: The logits.
        result: Of the function.

    Returns:
        Whether it is; True, too, for what is no tensor.
    """
    found = tensors_in((result,))
    if any(_size_apart(tensor) != _size_apart(before) for tensor in found):
        return False
    for tensor in found:
        setattr(tensor, _MARK, True)
    return True


def takes_parts_as_loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch computes a cross-entropy from parts.

    Args:
        args: Of ``F.cross_entropy``.
        kwargs: Of it, by name.
    """
    given = _CROSS_ENTROPY.bind(*args, **kwargs).arguments
    logits, targets = given["input"], given["target"]
    classes = Shard(min(logits.dim() - 1, 1))
    return (
        is_apart(logits)
        and logits.placements == (classes,)
        and not is_apart(targets)
        and not targets.is_floating_point()
        and not given.get("label_smoothing")
    )


def writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into its first argument.

    Args:
        func: Of torch.
        kwargs: Its arguments by name.
    """
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or func is Tensor.__setitem__ or bool(kwargs.get("inplace"))


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Lists the tensors in a function's arguments.

    Args:
        values: The arguments; no deeper than lists, for this is asked at each operation of a step.
    """
    parts = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return [part for part in chain.from_iterable(parts) if isinstance(part, Tensor)]


def _size_apart(tensor: Tensor) -> int | None:
    """Gives the size of the dim along which a tensor is spread; None if it is not, or oddly."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return tensor.shape[placement.dim] if type(placement) is Shard else None


_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class ShardedLogits(TorchFunctionMode):
    """What a step runs in; looks at each of torch's functions that the step calls.

    Attributes:
        is_active: Whether a step runs in it. Heads leave logits apart only then.
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
        """Calls a function with the logits apart or joined.

        Args:
            func: Of torch.
            types: Of its arguments.
            args: Its arguments.
            kwargs: Its arguments by name.

        Raises:
            ValueError: The logits have been written to, and this is another view of them.
        """
        named = kwargs or {}
        if func in _DIFFERENTIATE:
            return _differentiate(func, args, named)
        tensors = tensors_in((*args, *named.values()))
        if not any(map(is_apart, tensors)):
            return func(*args, **named)
        if self._written:
            args, named = map_tensors(self._newest, (args, named))
            tensors = tensors_in((*args, *named.values()))
        if func is F.cross_entropy and takes_parts_as_loss(args, named):
            with loss_parallel():
                return joined(func(*args, **named)).clone()  # FSDP2 wants no view of a step
        if all(map(is_apart, tensors)) and takes_parts(func, args):
            with suppress(RuntimeError):  # a `DTensor` has no such view; the whole may have
                result = func(*args, **named)
                if keep_sharded(tensors[0], result):
                    return result
        if writes(func, named) and is_apart(args[0]):
            return self._write(func, args, named)
        args, named = map_tensors(_join, (args, named))
        return func(*args, **named)

    def _write(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Lets a function write into the joined logits, which take the place of those apart."""
        logits, *others = args
        copy = whole(logits).clone()  # autograd refuses a write into the gathered tensor
        self._written[id(logits)] = (logits, copy)
        others, named = map_tensors(_join, (others, named))
        return func(copy, *others, **named)

    def _newest(self, tensor: Tensor) -> Tensor:
        """Gives what has been written to instead of what it was written for."""
        if not is_apart(tensor):
            return tensor
        if id(tensor) in self._written:
            return self._written[id(tensor)][1]
        places = {_place(logits) for logits, _ in self._written.values()}
        if _place(tensor) in places:
            raise ValueError(
                "With loss_parallel=True the step has written into logits, and then used another"
                " view of the same logits, which would not see it. Write into a copy"
                " (`logits = logits.clone()`), and use that from then on."
            )
        return tensor


def joined(tree: Any) -> Any:
    """Joins what is apart in a tree; all ranks must call it.

    Args:
        tree: Any.
    """
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
    if func is torch.autograd.grad:  # the slope of logits is apart, as they are
        for source, slope in zip(tensors_in(args[1:2]), found, strict=True):
            if is_apart(source) and slope is not None:
                keep_sharded(source, slope)
    return found


def _join(tensor: Tensor) -> Tensor:
    return whole(tensor) if is_apart(tensor) else tensor


def _place(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()

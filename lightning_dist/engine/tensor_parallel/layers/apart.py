"""What of torch may see logits of which each rank has a part: a closed list.

Everything else gets them joined, for a ``DTensor`` promises less than a tensor: ``.item()`` of its
mean is one rank's own, and torch's ``loss_parallel`` differentiates each ``log_softmax`` as if it
were a cross-entropy's. What is here treats each element by itself, or changes the shape, and leaves
the vocabulary in one piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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


def stay_apart(before: Tensor, result: Any) -> bool:
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

"""Logits that each rank has a part of, under a step that does not know.

The head leaves its output apart, as a ``DTensor`` over the vocabulary. torch's ``loss_parallel``
makes ``F.cross_entropy`` compute the loss from the parts; the whole logits exist nowhere, forward
or backward. On the way there the step may shape and scale them
(:mod:`.layers.apart`). Whatever else it does with them, an accuracy say, or another
loss, gets them joined. What writes into them joins them for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dist.engine.tensor_parallel.layers.apart import (
    is_apart,
    stay_apart,
    takes_parts,
    takes_parts_as_loss,
    tensors_in,
    writes,
)
from lightning_dist.engine.tensors.local_part import local_part
from lightning_dist.engine.tensors.shards import whole
from lightning_dist.engine.tensors.tree import map_tensors

_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class LogitsApart(TorchFunctionMode):
    """What a step runs in; looks at each of torch's functions that the step calls.

    Attributes:
        is_active: Whether a step runs in it. Heads leave logits apart only then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_active = False
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def __enter__(self) -> LogitsApart:
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
                if stay_apart(tensors[0], result):
                    return result
        if writes(func, named) and is_apart(args[0]):
            return self._write(func, args, named)
        args, named = map_tensors(_join, (args, named))
        return func(*args, **named)

    def _write(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Lets a function write into the joined logits, which take the place of those apart."""
        logits, *others = args
        copy = whole(logits).clone()  # autograd lets nobody write into what was joined
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
                stay_apart(source, slope)
    return found


def _join(tensor: Tensor) -> Tensor:
    return whole(tensor) if is_apart(tensor) else tensor


def _place(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()

"""Count what forwards keep for their backwards, and the most of it at a time.

Autograd hands over each tensor that it keeps, and drops what it got in return when it needs it no
more. Tensors on the same memory count once, and weights, which are there anyway, not at all.

How many bytes of each kind a rank holds for training.

Know the memory of the weights that modules compute with.

These are not the parameters everywhere: stages of a pipeline run on versions of them, and half
precision on copies, which take the parameters' places while a module is called.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.observers import SavedTensorsWatch
from lightning_dist.engine.tensors.remote_tensor import RemoteTensor
from lightning_dist.engine.tensors.tree import flatten


class ActivationMeter:
    """Watches what is kept while it is entered, and afterwards until it is dropped.

    Args:
        parameters: Plain tensors, whose memory does not count.
        weights: Addresses of memory that does not count at the moment.
    """

    def __init__(self, parameters: Iterable[Tensor], weights: Container[int] = ()) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._weights = weights
        self._users: dict[int, int] = {}
        self._watch = SavedTensorsWatch(self._note)
        self.num_bytes = 0
        self.peak_bytes = 0
        self.total_bytes = 0

    def __enter__(self) -> ActivationMeter:
        """Begins."""
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; what is kept is still watched."""
        self._watch.__exit__()

    def _note(self, tensor: Tensor) -> list[_Claim]:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return []
        parts = ((p.data_ptr(), p.nbytes()) for p in _storages(tensor))
        return [
            _Claim(self, place, num_bytes)
            for place, num_bytes in parts
            if place not in self._own and place not in self._weights
        ]

    def claim(self, place: int, num_bytes: int) -> None:
        """Counts one more user of some memory.

        Args:
            place: Its address.
            num_bytes: Its size.
        """
        users = self._users.get(place, 0)
        self._users[place] = users + 1
        if not users:
            self.num_bytes += num_bytes
            self.total_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def drop(self, place: int, num_bytes: int) -> None:
        """Counts one user less of some memory.

        Args:
            place: Its address.
            num_bytes: Its size.
        """
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.num_bytes -= num_bytes


class _Claim:
    """One tensor's share in some memory, for as long as it lives."""

    def __init__(self, meter: ActivationMeter, place: int, num_bytes: int) -> None:
        self._meter = meter
        self._memory = (place, num_bytes)
        meter.claim(*self._memory)

    def __del__(self) -> None:
        self._meter.drop(*self._memory)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Finds a tensor's memory, or that of the tensors it is made of; a sparse one's is left out."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Adds up this rank's memory of tensors; what several share counts once.

    Args:
        tensors: Whole, or shards.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor.detach()).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Adds up the gradients that are there.

    Args:
        parameters: Whose.
    """
    return bytes_of(p.grad for p in parameters if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Adds up what optimizers keep for their parameters, step counts left out.

    Args:
        optimizers: Of this rank.
    """
    kept = (t for o in optimizers for t in flatten([*o.state.values()])[0])
    return bytes_of(t for t in kept if t is not None and t.dim() > 0)


class WeightsInUse:
    """Holds addresses, of the calls that run while it is entered.

    A version may be gone after the call, and its memory somebody else's.
    """

    def __init__(self) -> None:
        self._calls: list[frozenset[int]] = []
        self._handles: list[RemovableHandle] = []

    def __contains__(self, place: object) -> bool:
        """Whether some memory is that of a weight in use."""
        return any(place in call for call in self._calls)

    def __enter__(self) -> WeightsInUse:
        """Begins."""
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _begin(self, module: nn.Module, _: Any) -> None:
        here = (p for p in module.parameters() if not isinstance(p, RemoteTensor))
        own = (local_part(p.detach()) for p in here)
        self._calls.append(frozenset(p.untyped_storage().data_ptr() for p in own))

    def _end(self, *_: Any) -> None:
        self._calls.pop()

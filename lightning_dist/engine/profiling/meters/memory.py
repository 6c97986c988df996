"""The bytes that a rank holds for training, and those that forwards keep for their backwards.

Autograd calls a hook with each tensor that it keeps, and drops the hook's result when it needs the
tensor no more. Tensors in the same memory count once. Weights, which exist anyway, do not count.
These are not always the parameters. A pipeline's stages run on versions, and half precision on
copies, which replace the parameters while a module is called.
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
from lightning_dist.engine.tensors.tree import tensors_in


class ActivationMeter:
    """Counts tensors that autograd keeps while the meter is entered, until they are dropped.

    Args:
        parameters: Plain tensors, whose memory does not count.
        weights: Addresses of memory that does not count at the moment.
    """

    def __init__(self, parameters: Iterable[Tensor], weights: Container[int] = ()) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._weights = weights
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._watch = SavedTensorsWatch(self._note)
        self.num_bytes = 0
        self.peak_bytes = 0
        self.total_bytes = 0

    def __enter__(self) -> ActivationMeter:
        """Begins to count."""
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Counts no more new tensors; kept tensors are still watched until they are dropped."""
        self._watch.__exit__()

    def _note(self, tensor: Tensor) -> list[_Claim]:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return []
        # On the meta device no memory has an address, but each has an object of its own.
        parts = ((p.data_ptr() or p._cdata, p.nbytes()) for p in _storages(tensor))
        return [
            _Claim(self, place, num_bytes)
            for place, num_bytes in parts
            if place not in self._own and place not in self._weights
        ]

    def add_user(self, place: int, num_bytes: int) -> None:
        """Counts one more user of the memory at an address."""
        users = self._users.get(place, 0)
        self._users[place] = users + 1
        if not users:
            self._sizes[place] = num_bytes
            self.num_bytes += num_bytes
            self.total_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def shared_bytes(self, others: Iterable[ActivationMeter]) -> int:
        """Returns the bytes of what other meters count at the moment, too."""
        places = {place for other in others for place in other._users}
        return sum(self._sizes[place] for place in self._users.keys() & places)

    def remove_user(self, place: int, num_bytes: int) -> None:
        """Counts one user less of the memory at an address."""
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.num_bytes -= num_bytes


class _Claim:
    """One tensor's use of some memory, for the lifetime of this object."""

    def __init__(self, meter: ActivationMeter, place: int, num_bytes: int) -> None:
        self._meter = meter
        self._memory = (place, num_bytes)
        meter.add_user(*self._memory)

    def __del__(self) -> None:
        self._meter.remove_user(*self._memory)


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yields a tensor's memory, or that of its inner tensors; none for a sparse tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor's mesh, too, is listed
                yield from _storages(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns this rank's bytes of tensors, plain or sharded; shared memory counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = local_part(tensor.detach()).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of the gradients of parameters that have some."""
    return bytes_of(p.grad for p in parameters if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the bytes of the states of this rank's optimizers, without step counts."""
    kept = (t for o in optimizers for t in tensors_in([*o.state.values()]))
    return bytes_of(t for t in kept if t.dim() > 0)


class WeightsInUse:
    """The addresses of the weights of the module calls that run at the moment, and of parameters.

    A version may be freed after the call, and its memory used for another tensor. A parameter moves
    to other memory between batches, if a batch in flight needs its values. Of a DTensor the local
    part counts.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._parameters = [*parameters]
        self._own = _addresses(self._parameters)
        self._calls: list[frozenset[int]] = []
        self._handles: list[RemovableHandle] = []

    def __contains__(self, place: object) -> bool:
        """Returns whether an address is that of a weight in use, or of a parameter."""
        return place in self._own or any(place in call for call in self._calls)

    def __enter__(self) -> WeightsInUse:
        """Begins to watch module calls."""
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not self._calls:
            self._own = _addresses(self._parameters)
        here = (p for p in module.parameters() if not isinstance(p, RemoteTensor))
        self._calls.append(_addresses(here))

    def _end(self, *_: Any) -> None:
        self._calls.pop()


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    own = (local_part(tensor.detach()) for tensor in tensors)
    return frozenset(part.untyped_storage().data_ptr() for part in own)

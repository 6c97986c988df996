"""One call of a constructor, recorded so that it can run again on real bytes.

An operation names memory, not tensors: two views of one storage are two references to the same
number. A random operation keeps the state of its generator before the call. An operation without a
dtype keeps the default dtype of that moment (precision plugins set it while a model is built).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_dist.engine.tensors.tree import flatten, unflatten

Memory = dict[int, torch.UntypedStorage]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A tensor, as the place of its elements.

    Attributes:
        storage: Number of its storage on the tape.
        num_bytes: Size of the storage.
        dtype: Type of an element.
        size: Elements per dimension.
        stride: Elements from one index to the next, per dimension.
        offset: Elements before the first.
        is_conj: Whether the elements stand for their conjugates.
        is_neg: Whether the elements stand for their negatives.
    """

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def new_storage(self) -> torch.UntypedStorage:
        """Allocates a storage of the recorded size."""
        return torch.UntypedStorage(self.num_bytes, device="cpu")

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the tensor as a view of real bytes."""
        bare = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor = bare.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        # The view behind `x.conj().imag`; torch has no public name for it.
        return torch._neg_view(tensor) if self.is_neg else tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call.

    Attributes:
        function: The called function.
        skeleton: The call's arguments, with a slot for each tensor.
        inputs: The arguments' tensors: references, or constants that are not on the tape.
        reads: Storages whose bytes the result depends on.
        writes: Storages that are made or changed.
        default_dtype: The default floating dtype at the time of the call.
        generator: The generator of a random operation.
        generator_state: State of the generator before the call.
        results: The tensors of the result.
    """

    function: Any
    skeleton: Any
    inputs: tuple[Reference | Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    default_dtype: torch.dtype
    generator: torch.Generator | None = None
    generator_state: Tensor | None = None
    results: tuple[Reference, ...] = ()

    def run(self, memory: Memory) -> Any:
        """Calls the function on real bytes, adds new storages to the memory, returns the result."""
        for reference in self.inputs:
            if isinstance(reference, Reference) and reference.storage not in memory:
                assert reference.storage not in self.reads
                memory[reference.storage] = reference.new_storage()
        tensors = [i if isinstance(i, Tensor) else i.on(memory[i.storage]) for i in self.inputs]
        args, kwargs = unflatten(tensors, self.skeleton)
        returned = self.function(*args, **kwargs)
        made = flatten(returned)[0] if self.results else []
        for reference, tensor in zip(self.results, made, strict=True):
            if reference.storage not in memory:
                memory[reference.storage] = _as_recorded(reference, tensor)
        return returned

    def run_again(self, memory: Memory) -> None:
        """Calls the function again, with the recorded default dtype and random numbers."""
        default_dtype = torch.get_default_dtype()
        outside = None if self.generator is None else self.generator.get_state()
        torch.set_default_dtype(self.default_dtype)
        if self.generator is not None and self.generator_state is not None:
            self.generator.set_state(self.generator_state)
        try:
            self.run(memory)
        finally:
            torch.set_default_dtype(default_dtype)
            if self.generator is not None and outside is not None:
                self.generator.set_state(outside)


def _as_recorded(reference: Reference, tensor: Tensor) -> torch.UntypedStorage:
    """Returns the storage of a result, in the layout of its reference."""
    assert tensor.dtype == reference.dtype
    storage = tensor.untyped_storage()
    same = (reference.stride, reference.offset) == (tensor.stride(), tensor.storage_offset())
    if same and storage.nbytes() == reference.num_bytes:
        return storage
    storage = reference.new_storage()  # on the meta device SVD's results have another layout
    reference.on(storage).copy_(tensor)
    return storage

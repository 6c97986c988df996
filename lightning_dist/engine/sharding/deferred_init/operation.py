"""One call of a constructor, so written down that it can run again on real bytes.

An operation names memory, not tensors: two views of one storage are two references to the same
number. A random operation keeps the state that its generator had before, and an operation without a
type the default type of that moment (precision plugins set it while a model is built).
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
        num_bytes: Size of that storage.
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

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Gives the tensor over real bytes."""
        bare = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor = bare.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        # The view behind `x.conj().imag`; torch has no public name for it.
        return torch._neg_view(tensor) if self.is_neg else tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One call.

    Attributes:
        function: What was called.
        skeleton: Its arguments, with a slot for each tensor.
        inputs: The tensors: references, or constants that no tape has made.
        reads: Storages whose bytes the result depends on.
        writes: Storages that are made or changed.
        default_dtype: The floating type that tensors were made of where none was named.
        generator: What a random operation draws from.
        generator_state: As it was before the call.
        results: The tensors of what it returned.
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

    @property
    def storages(self) -> frozenset[int]:
        """All storages that it needs, makes or changes."""
        return self.reads | self.writes

    def run(self, memory: Memory) -> Any:
        """Calls the function on real bytes, and adds the storages that it makes.

        Args:
            memory: The storages that it reads. Those that it overwrites whole may be missing.

        Returns:
            What the function returned.
        """
        for reference in self.inputs:
            if isinstance(reference, Reference) and reference.storage not in memory:
                assert reference.storage not in self.reads
                memory[reference.storage] = _new_storage(reference)
        tensors = [i if isinstance(i, Tensor) else i.on(memory[i.storage]) for i in self.inputs]
        args, kwargs = unflatten(tensors, self.skeleton)
        returned = self.function(*args, **kwargs)
        made = flatten(returned)[0] if self.results else []
        for reference, tensor in zip(self.results, made, strict=True):
            if reference.storage not in memory:
                memory[reference.storage] = _as_recorded(reference, tensor)
        return returned

    def run_again(self, memory: Memory) -> None:
        """Calls the function as it was called, with the same random numbers."""
        torch.set_default_dtype(self.default_dtype)
        if self.generator is None or self.generator_state is None:
            self.run(memory)
            return
        outside = self.generator.get_state()
        self.generator.set_state(self.generator_state)
        try:
            self.run(memory)
        finally:
            self.generator.set_state(outside)


def _new_storage(reference: Reference) -> torch.UntypedStorage:
    return torch.UntypedStorage(reference.num_bytes, device="cpu")


def _as_recorded(reference: Reference, tensor: Tensor) -> torch.UntypedStorage:
    """Gives the storage of a result, laid out as its references say.

    A function may lay its result out otherwise on the meta device than on the CPU (SVD does).
    """
    assert tensor.dtype == reference.dtype
    storage = tensor.untyped_storage()
    same = (reference.stride, reference.offset) == (tensor.stride(), tensor.storage_offset())
    if same and storage.nbytes() == reference.num_bytes:
        return storage
    storage = _new_storage(reference)
    reference.on(storage).copy_(tensor)
    return storage

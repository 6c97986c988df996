"""A record of a constructor's operations, from which its tensors can be made one at a time.

The operations refer to storages. So a view needs no entry, and a tensor that was tied, viewed or
swapped through ``.data`` needs no special case. A tensor's value is computed by the operations that
wrote to its storage, run again in order.

Only the operations that a tensor depends on run, and memory is freed after its last use. Random
numbers are drawn from the recorded states, so they do not depend on the number or the order of the
tensors that are made. An operation without a dtype keeps the default dtype of its moment, which
precision plugins set while a model is built.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_dist.engine.tensors.tree import tensors_in, unflatten

Memory = dict[int, torch.UntypedStorage]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A tensor, as the place of its elements in a storage of the tape."""

    storage: int  # its number on the tape
    num_bytes: int  # of the storage
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
    """One call."""

    function: Any
    skeleton: Any  # the arguments, with a slot for each tensor
    inputs: tuple[Reference | Tensor, ...]  # their tensors; constants are not on the tape
    reads: frozenset[int]  # storages whose bytes the result depends on
    writes: frozenset[int]  # storages that are made or changed
    default_dtype: torch.dtype  # as it was at the call
    generator: torch.Generator | None = None  # of a random operation
    generator_state: Tensor | None = None  # before the call
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
        made = tensors_in(returned) if self.results else []
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


class Tape:
    """Operations in the order of their calls, and the values that they compute."""

    def __init__(self) -> None:
        # torch keeps one Python object per storage as long as it is referenced; referenced here, it
        # is an identity that no later storage gets.
        self._numbers: dict[torch.UntypedStorage, int] = {}
        self._operations: list[Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._looked_at: Memory = {}
        self._held: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether the tape can make a tensor's values."""
        return tensor.is_meta and tensor.untyped_storage() in self._numbers

    def refer(self, tensor: Tensor) -> Reference:
        """Returns the reference to a meta tensor; a new storage gets a number."""
        storage = tensor.untyped_storage()
        return Reference(
            storage=self._numbers.setdefault(storage, len(self._numbers)),
            num_bytes=storage.nbytes(),
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(map(int, tensor.stride())),
            offset=int(tensor.storage_offset()),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def append(self, operation: Operation) -> None:
        """Adds the latest operation."""
        for storage in operation.writes:
            self._writers[storage].append(len(self._operations))
            self._looked_at.pop(storage, None)
        self._operations.append(operation)

    def run_now(self, operation: Operation, *, keep: bool) -> Any:
        """Runs an operation on the present values, without a change to the tape.

        Args:
            operation: An operation that is not on the tape.
            keep: Whether to keep the operation's inputs until the next read. A loop that reads
                again and again, like the rejection sampling of a truncated normal, would otherwise
                replay from the beginning each time.

        Returns:
            The function's result, with real tensors.
        """
        memory = self._replay(operation.reads, dict(self._looked_at), keep_all=keep)
        self._looked_at = memory if keep else self._looked_at
        return operation.run(memory if keep else dict(memory))

    def value(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor's present values."""
        reference = self.refer(tensor)
        memory = self._replay([reference.storage], dict(self._looked_at), keep_all=True)
        self._looked_at = memory
        return reference.on(memory[reference.storage]).clone()

    def close(self) -> None:
        """Frees the kept values; call it when nothing more will be recorded."""
        self._looked_at = {}

    def materialize(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with its values.

        As long as the caller holds the result, other views of the same storage are returned as
        views of the same memory, so tied tensors stay tied.

        Args:
            tensor: A meta tensor that was made while this tape was recorded, or a real one.

        Returns:
            A CPU tensor of the same size, strides and type; a real tensor as it is.

        Raises:
            ValueError: The tensor is on the meta device, and is not on this tape.
        """
        if not tensor.is_meta:
            return tensor
        if not self.knows(tensor):
            raise ValueError(
                f"There are no values for a meta tensor of size {tuple(tensor.shape)}: it was made"
                " with device='meta', or outside of the `deferred_init` of this tape."
            )
        reference = self.refer(tensor)
        storage = self._held.get(reference.storage)
        if storage is None:
            storage = self._replay([reference.storage], {}, keep_all=False)[reference.storage]
            self._held[reference.storage] = storage
        return reference.on(storage)

    def _replay(self, wanted: Iterable[int], memory: Memory, *, keep_all: bool) -> Memory:
        """Returns storages as they are after the last operation."""
        wanted = frozenset(wanted)
        plan, known = self._plan(wanted, memory)
        memory = {storage: memory[storage] for storage in known}
        run = self._operations
        uses = {index: run[index].reads | run[index].writes for index in plan}
        last_use = {storage: index for index in plan for storage in uses[index]}
        with torch.no_grad():
            for index in plan:
                self._operations[index].run_again(memory)
                for storage in () if keep_all else uses[index]:
                    if last_use[storage] == index and storage not in wanted:
                        memory.pop(storage, None)
        done = frozenset(plan)
        up_to_date = [s for s in memory if s in known or self._writers[s][-1] in done]
        return {storage: memory[storage] for storage in up_to_date}

    def _plan(self, wanted: Iterable[int], memory: Memory) -> tuple[list[int], set[int]]:
        """Returns the operations that storages depend on, and the storages that are known."""
        needed: set[int] = set()
        known: set[int] = set()
        open_ends = [(storage, len(self._operations)) for storage in wanted]
        while open_ends:
            storage, end = open_ends.pop()
            writers = self._writers[storage]
            if storage in memory:
                if writers[-1] >= end:  # an earlier value is needed, too: start without memory
                    return self._plan(wanted, {})
                known.add(storage)
                continue
            for index in reversed(writers):
                operation = self._operations[index]
                if index < end and index not in needed:
                    needed.add(index)
                    open_ends += [(read, index) for read in operation.reads]
                if index < end and storage not in operation.reads:  # made or overwritten here
                    break
        return sorted(needed), known

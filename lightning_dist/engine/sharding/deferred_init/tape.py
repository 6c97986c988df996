"""What a constructor has done to its tensors, kept so that one of them at a time can be made.

The operations are about storages. So a view needs no entry, a tensor that was tied, viewed or
swapped through ``.data`` needs no special case, and the value of a tensor is what the operations
that wrote to its storage give when they run again, in order.

Only the operations that a tensor depends on run, and memory goes as soon as the last of them has
used it. Random numbers are drawn from the recorded states, so they do not depend on how many
tensors are made, nor in which order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_dist.engine.sharding.deferred_init.operation import Memory, Operation, Reference


class Tape:
    """Operations in the order in which they were called, and the way back to values."""

    def __init__(self) -> None:
        # torch keeps one Python object per storage for as long as somebody holds it; held here, it
        # is an identity that no later storage gets.
        self._numbers: dict[torch.UntypedStorage, int] = {}
        self._operations: list[Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._looked_at: Memory = {}
        self._held: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def knows(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is one whose values the tape can make."""
        return tensor.is_meta and tensor.untyped_storage() in self._numbers

    def refer(self, tensor: Tensor) -> Reference:
        """Gives the place of a meta tensor; a storage not seen before gets a number."""
        storage = tensor.untyped_storage()
        return Reference(
            self._numbers.setdefault(storage, len(self._numbers)),
            storage.nbytes(),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(map(int, tensor.stride())),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def append(self, operation: Operation) -> None:
        """Adds the operation that has been called last."""
        for storage in operation.writes:
            self._writers[storage].append(len(self._operations))
            self._looked_at.pop(storage, None)
        self._operations.append(operation)

    def run_now(self, operation: Operation, *, keep: bool) -> Any:
        """Runs an operation on the values of the moment; the tape stays as it is.

        Args:
            operation: One that is not on the tape.
            keep: Whether to hold on to the values it needed until the next look. A loop that looks
                again and again, like the rejection sampling of a truncated normal, would otherwise
                start from the beginning each time.

        Returns:
            What its function returned, with real tensors.
        """
        memory = self._replay(operation.reads, dict(self._looked_at), keep_all=keep)
        self._looked_at = memory if keep else self._looked_at
        return operation.run(memory if keep else dict(memory))

    def value(self, tensor: Tensor) -> Tensor:
        """Gives a copy of what a tensor holds at the moment."""
        reference = self.refer(tensor)
        memory = self._replay([reference.storage], dict(self._looked_at), keep_all=True)
        self._looked_at = memory
        return reference.on(memory[reference.storage]).clone()

    def close(self) -> None:
        """Lets go of values; call it when nothing more will be recorded."""
        self._looked_at = {}

    def materialize(self, tensor: Tensor) -> Tensor:
        """Makes the values of a tensor.

        As long as the caller holds what it got, other views of the same storage come out as views
        of the same memory: what was tied is tied. Let go of it before the next call, or the memory
        of several adds up.

        Args:
            tensor: A meta tensor that was made while this tape was recorded, or a real one.

        Returns:
            A CPU tensor of the same size, strides and type, without a gradient; a real tensor as it
            is.

        Raises:
            ValueError: The tensor is on the meta device, and none of this tape's.
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
        """Adds storages as they are after the last operation.

        Args:
            wanted: Storages.
            memory: What is known of this moment.
            keep_all: Whether to keep what was needed on the way.

        Returns:
            Storages as they are now. Others that were needed as they once were are left out.
        """
        wanted = frozenset(wanted)
        plan, known = self._plan(wanted, memory)
        memory = {storage: memory[storage] for storage in known}
        last_use = {s: index for index in plan for s in self._operations[index].storages}
        with torch.no_grad(), _default_dtype_kept():
            for index in plan:
                self._operations[index].run_again(memory)
                for storage in () if keep_all else self._operations[index].storages:
                    if last_use[storage] == index and storage not in wanted:
                        memory.pop(storage, None)
        done = frozenset(plan)
        up_to_date = [s for s in memory if s in known or self._writers[s][-1] in done]
        return {storage: memory[storage] for storage in up_to_date}

    def _plan(self, wanted: Iterable[int], memory: Memory) -> tuple[list[int], set[int]]:
        """Finds the operations that storages depend on, and what is known of them already."""
        needed: set[int] = set()
        known: set[int] = set()
        open_ends = [(storage, len(self._operations)) for storage in wanted]
        while open_ends:
            storage, end = open_ends.pop()
            writers = self._writers[storage]
            if storage in memory:
                if writers[-1] >= end:  # an earlier value is asked for, too: begin without any
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


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    outside = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(outside)

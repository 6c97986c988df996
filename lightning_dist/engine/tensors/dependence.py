"""Which tensors are computed from given ones, as told by watching each operation.

Values cannot tell it: NaNs as marks are lost in a comparison, and integers have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.observers import OperationWatch
from lightning_dist.engine.tensors.tree import flatten

# Of their tensor they take no more than shape, dtype and device.
_SHAPES_ONLY = ("_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default)


class DependenceWatch(OperationWatch):
    """Marks what is computed from marked tensors, while entered.

    A view is marked with its base, and a tensor that is written in place with what is written. What
    takes only a tensor's shape, dtype or device does not depend on it.

    Args:
        on_read: Called when a Python number is made of a marked tensor, as by ``if`` or ``item``.
    """

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__(self._note)
        self._on_read = on_read
        # torch keeps one Python object per storage as long as it is referenced.
        self._marked: set[torch.UntypedStorage] = set()

    def mark(self, tree: Any) -> None:
        """Marks a tree's tensors."""
        self._marked.update(_memory_of(t) for t in flatten(tree)[0] if not t.is_sparse)

    def has_marked(self, tree: Any) -> bool:
        """Returns whether one of a tree's tensors is marked."""
        return any(not t.is_sparse and _memory_of(t) in self._marked for t in flatten(tree)[0])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs a block of code that is not watched."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self._marked or not self.has_marked((args, kwargs)):
            return
        if func in _READS:
            self._on_read()
        if isinstance(func, OpOverload):
            if func.overloadpacket.__name__.endswith(_SHAPES_ONLY):
                return
            if func._schema.is_mutable:
                self.mark((args, kwargs))
        self.mark(result)


def _memory_of(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()

"""Builds a model without its memory, and makes its parameters one at a time.

Under :func:`deferred_init` a constructor makes tensors on the meta device, and a tape records its
operations. Each rank then makes one parameter after the other, keeps its shard and frees the rest.
The values, and the generators' states afterwards, are bit for bit those of the constructor on the
CPU. (torchdistx, no longer kept up, had the idea.)

An operation that reads a value (``item``, ``if``, a boolean mask) gets the value: the tensors that
it depends on are computed and freed again. Tensors from data, and those of constructors like
``torch.Tensor(2, 3)``, are made at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.engine.sharding.deferred_init.fake_cpu_mode import FakeCPUMode
from lightning_dist.engine.sharding.deferred_init.recorder import Recorder
from lightning_dist.engine.sharding.deferred_init.tape import Tape
from lightning_dist.engine.sharding.fully_shard import fill
from lightning_dist.engine.tensors.module_tree import map_other_tensors


@contextmanager
def deferred_init(*, only_shapes: bool = False) -> Iterator[Tape]:
    """Records the construction of a model instead of filling its memory.

    Inside, tensors are made on the meta device, though their ``device`` is the CPU. Tensors from
    data, on other devices, or of a module with ``device="meta"`` are made as usual. An outer
    ``with torch.device(...)`` has no effect: the values are those of the CPU. Changes of a tensor
    after the ``with`` are lost.

    Args:
        only_shapes: Whether the values are not needed. Then no random values are drawn, on which a
            large model's constructor spends most of its time.

    Yields:
        The tape, whose :meth:`.Tape.materialize` makes the values.

    Example:
        >>> with deferred_init() as tape:
        ...     model = nn.Linear(2, 2)
        >>> for name, tensor in named_tensors(model).items():
        ...     print(name, tape.materialize(tensor).shape)
        weight torch.Size([2, 2])
        bias torch.Size([2])
    """
    tape = Tape()
    recorder = Recorder(tape, only_shapes=only_shapes)
    try:
        # Lightning builds models under the device that they will train on.
        with torch.device("cpu"), recorder, FakeCPUMode(recorder):
            yield tape
    finally:
        tape.close()


def named_tensors(module: nn.Module, *, every_name: bool = False) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a module, before it is sharded or moved.

    Args:
        module: The module that was built under :func:`deferred_init`.
        every_name: Whether a tied tensor is listed under all of its names, not only the first.

    Returns:
        Tensors by name, including those that the state dict leaves out. They stand for the values
        even when the module has other tensors later.
    """
    once = not every_name
    parameters = module.named_parameters(remove_duplicate=once)
    named = [*parameters, *module.named_buffers(remove_duplicate=once)]
    return {name: tensor.detach() for name, tensor in named}


class DeferredModel:
    """Records a model's construction, and fills the sharded model with its values."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
        self._tensors: Mapping[str, Tensor] = {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Returns a context manager in which models are built without memory."""
        with deferred_init() as self._tape:
            yield

    def look_at(self, module: nn.Module) -> None:
        """Records the tensors of a module as it was built, before sharding replaces them.

        Those that are no parameters or buffers, such as a metric's states, get their values at
        once, whole and on the host, where a constructor would have left them.
        """
        # A stage may have a tied tensor under a later name.
        self._tensors = named_tensors(module, every_name=True)
        if self._tape is not None:
            map_other_tensors(module, self._value_of_other)

    def _value_of_other(self, tensor: Tensor) -> Tensor:
        assert self._tape is not None
        # Another name for a parameter or buffer is left without values: a copy would go stale.
        memory = (t.untyped_storage() for t in self._tensors.values() if t.is_meta)
        if not self._tape.knows(tensor) or tensor.untyped_storage() in memory:
            return tensor
        return self._tape.materialize(tensor)

    def fill(self, module: nn.Module, device: torch.device, *, offloaded: bool = False) -> None:
        """Fills a module with its values; each rank keeps its shards.

        Args:
            module: The module that :meth:`look_at` was called with, now sharded.
            device: Device of the buffers.
            offloaded: Whether shards are in host memory.
        """
        tape, tensors = self._tape, self._tensors
        self._tape, self._tensors = None, {}
        if tape is None:
            return
        deferred = [n for n in named_tensors(module) if n in tensors and tensors[n].is_meta]

        def value_of(name: str) -> Tensor:
            return tape.materialize(tensors[name])

        fill(module, deferred, value_of, device, offloaded=offloaded)

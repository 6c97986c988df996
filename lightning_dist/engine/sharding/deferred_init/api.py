"""Build a model without its memory, and make its parameters one at a time.

A model that is to be sharded need not fit onto any one rank, but its constructor fills whole
parameters. Under :func:`deferred_init` the same constructor makes tensors on the meta device, which
have no bytes, and a tape keeps what it did to them. Each rank then makes one parameter after the
other, keeps its shard and lets go of the rest. The values are those that the constructor gives on
the CPU under the same seed, bit for bit, on any number of ranks, and afterwards the generators
stand where the constructor would have left them. (torchdistx, no longer kept up, had the idea.)

What asks for a value (``item``, ``if``, ``nonzero``, a boolean mask) gets it: what it depends on is
computed, and thrown away. Not everything can be deferred, and what is not is made at once, as
without this: tensors from data, and those of constructors like ``torch.Tensor(2, 3)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.engine.sharding.deferred_init.fake_cpu_mode import FakeCPUMode
from lightning_dist.engine.sharding.deferred_init.recorder import Recorder
from lightning_dist.engine.sharding.deferred_init.tape import Tape


@contextmanager
def deferred_init(*, only_shapes: bool = False) -> Iterator[Tape]:
    """Records the construction of a model instead of filling its memory.

    Inside, tensors are made on the meta device, though they say that they are on the CPU. Tensors
    made from data, of other devices or by a module that asks for ``device="meta"`` are what they
    are without it. An outer ``with torch.device(...)`` is not heeded: the values are those of the
    CPU. Whatever is done to a tensor after the ``with`` is lost.

    Args:
        only_shapes: Whether nobody wants the values. Random ones are not drawn then, which takes a
            large model's constructor most of its time.

    Yields:
        The tape, whose :meth:`.Tape.materialize` gives the values.

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
    """Remembers the parameters and buffers of a module, before it is sharded or moved.

    Args:
        module: As it came out of :func:`deferred_init`.
        every_name: Whether a tied one is there by all of its names, not by the first alone.

    Returns:
        Tensors by name, those that the state dict leaves out among them. They stand for the values
        even when the module has other tensors by then.
    """
    once = not every_name
    parameters = module.named_parameters(remove_duplicate=once)
    named = [*parameters, *module.named_buffers(remove_duplicate=once)]
    return {name: tensor.detach() for name, tensor in named}

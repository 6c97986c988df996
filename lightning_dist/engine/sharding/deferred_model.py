"""A model that is built without memory, from ``configure_model`` until it has been sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from lightning_dist.engine.sharding.deferred_init.tape import Tape
from lightning_dist.engine.sharding.fully_shard import fill


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
        """Records a module's tensors, before sharding replaces them.

        Args:
            module: The module as it was built.
        """
        # A stage may have a tied tensor under a later name.
        self._tensors = named_tensors(module, every_name=True)

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Fills a module with its values; each rank keeps its shards.

        Args:
            module: The module that :meth:`look_at` was called with, now sharded.
            device: Device of the buffers.
        """
        tape, tensors = self._tape, self._tensors
        self._tape, self._tensors = None, {}
        if tape is None:
            return
        deferred = [n for n in named_tensors(module) if n in tensors and tensors[n].is_meta]
        fill(module, deferred, lambda name: tape.materialize(tensors[name]), device)

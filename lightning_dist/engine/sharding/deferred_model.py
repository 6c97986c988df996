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
    """Knows how to make the values of a model's tensors, if they have been deferred."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
        self._tensors: Mapping[str, Tensor] = {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Builds what is made inside without memory.

        Yields:
            Nothing.
        """
        with deferred_init() as self._tape:
            yield

    def look_at(self, module: nn.Module) -> None:
        """Remembers a module's tensors, before others are put in their place.

        Args:
            module: As it was built.
        """
        # A stage may know a tied one by a later name.
        self._tensors = named_tensors(module, every_name=True)

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Gives a module its values, of which each rank keeps its shards.

        Args:
            module: What :meth:`look_at` has seen, sharded by now.
            device: Where a buffer goes.
        """
        tape, tensors = self._tape, self._tensors
        self._tape, self._tensors = None, {}
        if tape is None:
            return
        deferred = [n for n in named_tensors(module) if n in tensors and tensors[n].is_meta]
        fill(module, deferred, lambda name: tape.materialize(tensors[name]), device)

"""Read the first batch of a run before it begins, so that the run does not notice.

The hooks that build loaders are called, and called again when the run begins: the run reads the
loaders of the second call. A loader of known length is read anew. Any other may be a stream that is
there once, so its iterator is kept, and the run goes on with it behind the first batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.strategies.base.lightning_loaders import request_loaders
from lightning_dist.strategies.base.loaders.loader_proxy import LoaderProxy
from lightning_dist.strategies.base.loaders.sample_lists import mark_first


class BegunLoaders:
    """The loaders that cannot be read anew, with the batches that have been read of them."""

    def __init__(self) -> None:
        self._begun: list[tuple[object, Iterator[Any]]] = []

    def first_of(self, loader: Any) -> Iterator[Any]:
        """Yields the first batch of a loader, if it has one; reads nothing before it is asked."""
        if _is_there_once(loader):
            iterator = iter(loader)
            first = list(islice(iterator, 1))
            self._begun.append((loader, chain(first, iterator)))
        else:
            with _own_generators_kept(loader):
                # A copy, for a loader keeps the iterator whose workers are persistent.
                first = list(islice(iter(copy.copy(loader)), 1))
        yield from first

    def resume(self, loader: object) -> object:
        """Returns the loader to read in the place of another, which may have been begun."""
        for index, (begun, batches) in enumerate(self._begun):
            dataset = getattr(loader, "dataset", None)
            if loader is begun or dataset is getattr(begun, "dataset", None) is not None:
                del self._begun[index]
                return ResumedLoader(loader, batches)
        return loader


class ResumedLoader(LoaderProxy):
    """A loader of whose first iteration a part has been read; the other batches are given."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        super().__init__(loader)
        self._batches: Iterator[Any] | None = batches
        if hasattr(loader, "load_state_dict"):
            self.load_state_dict = self._load_state_dict

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        batches, self._batches = self._batches, None
        return iter(self._loader) if batches is None else batches

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = None  # a resumed run goes on from where the state says
        self._loader.load_state_dict(state)


def read_first_batch(trainer: pl.Trainer, begun: BegunLoaders) -> tuple[Any, int] | None:
    """Returns the first collated batch of a run, and its number of loaders; None without one."""
    found = request_loaders(trainer)
    if found is None:
        return None
    loaders, mode = found
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)
    combined = copy.copy(combined)
    whole, flattened = combined.iterables, combined.flattened
    combined.flattened = [begun.first_of(loader) for loader in flattened]
    combined.limits = None
    for batch, _, index in combined:
        read = flattened[index] if mode == "sequential" else whole
        return mark_first(batch, read), len(flattened)
    return None


def _is_there_once(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return sized_len(loader) is None


@contextmanager
def _own_generators_kept(loader: object) -> Iterator[None]:
    """Restores the random generators of a loader, its samplers, its datasets, and those inside."""
    with ExitStack() as undo:
        todo, seen = [loader], set[int]()
        while todo:
            part = todo.pop()
            if id(part) in seen or not hasattr(part, "__dict__"):
                continue
            seen.add(id(part))
            for value in vars(part).values():
                _restore_at_exit(undo, value)
            todo += [vars(part).get(name) for name in ("dataset", "sampler", "batch_sampler")]
        yield


def _restore_at_exit(undo: ExitStack, value: Any) -> None:
    """Restores a value's state at the exit, if it is a random generator."""
    if isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, np.random.RandomState):
        undo.callback(value.set_state, value.get_state(legacy=True))
    elif isinstance(value, np.random.Generator):
        undo.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, random.Random):
        undo.callback(value.setstate, value.getstate())

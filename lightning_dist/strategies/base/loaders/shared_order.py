"""Random numbers that share the data out are drawn alike on all data replicas.

Replicas draw different random numbers, so that they augment and drop out differently. But a sampler
that shuffles and takes each second index, or a ``train_dataloader`` that calls ``random_split``,
shares the data out only if all replicas shuffle alike. Both draw from the same global generators,
so those of samplers and loader hooks are swapped in while these run. torch's batch sampler draws
the permutation with the first indices: without workers in the loader's first ``next``, right before
samples are augmented; with workers when the iterator is made. So the sampler itself is wrapped. The
order of an iterable dataset cannot be told from its augmentation: all numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.engine.tensors.rng import RandomStream
from lightning_dist.strategies.base.lightning_loaders import copy_of_loader
from lightning_dist.strategies.base.loaders.loader_proxy import LoaderProxy

Stream = Callable[[], RandomStream]


class SharedSampler(LoaderProxy):
    """A sampler that draws from a stream of its own; its public attributes are the sampler's.

    Args:
        sampler: Yields indices, or batches of indices.
        open_stream: Called when an epoch's indices begin.
        begin_epoch: Called then too, right before torch draws the seed of the workers.
        begin_reading: Called when the first indices are there, right before samples are read.
    """

    def __init__(
        self,
        sampler: Any,
        open_stream: Stream,
        begin_epoch: Callable[[], None],
        begin_reading: Callable[[], None],
    ) -> None:
        super().__init__(sampler)
        self._open_stream = open_stream
        self._begin_epoch = begin_epoch
        self._begin_reading = begin_reading

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        stream = self._open_stream()
        with stream.drawing():
            indices = iter(self._loader)
        self._begin_epoch()
        return _SharedItems(indices, stream, self._begin_reading)


class SharedReading(LoaderProxy):
    """A loader of an iterable dataset whose reading draws from a stream of its own."""

    def __init__(
        self, loader: DataLoader[Any], open_stream: Stream, seed_alike: Callable[[], None]
    ) -> None:
        super().__init__(loader)
        self._open_stream = open_stream
        self._seed_alike = seed_alike

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        self._seed_alike()
        return _SharedItems(iter(self._loader), self._open_stream(), _do_nothing)


def _do_nothing() -> None:
    pass


class _SharedItems(LoaderProxy):
    """The items of an iterator, drawn from a stream; calls a function behind the first.

    It has the iterator's state, if there is one: torchdata's loaders ask their samplers' iterators.
    """

    def __init__(
        self, iterator: Iterator[Any], stream: RandomStream, begin_reading: Callable[[], None]
    ) -> None:
        super().__init__(iterator)
        self._stream = stream
        self._begin_reading = begin_reading

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._stream.drawing():
            item = next(self._loader)
        begin, self._begin_reading = self._begin_reading, _do_nothing
        begin()
        return item


def share_order(
    loader: object,
    open_stream: Stream,
    seed_reader: Callable[[], None] | None,
    seed_alike: Callable[[], None],
) -> object:
    """Returns a loader that reads in an order that is drawn alike on all ranks.

    Iterables that are no loaders of torch's draw their order themselves, while they are read. The
    caller must seed the numbers that their ``__iter__`` draws at once.

    Args:
        loader: The loader; not changed.
        open_stream: Returns the random numbers of an epoch's order.
        seed_reader: Seeds this rank's generators for reading: called right before torch draws the
            seed of the loader's workers, or before an early first batch; None seeds nothing.
        seed_alike: Seeds the global generators alike on all ranks.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return SharedReading(loader, open_stream, seed_alike)
    # The caller seeds each batch where it is read, but Lightning reads the first one of a loader
    # of unknown length while it creates the iterator.
    is_read_early = loader.num_workers == 0 and sized_len(loader) is None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    seed = seed_reader or _do_nothing
    sampler = SharedSampler(
        getattr(loader, name),
        open_stream,
        begin_epoch=seed if loader.num_workers > 0 else _do_nothing,
        begin_reading=seed if is_read_early else _do_nothing,
    )
    return copy_of_loader(loader, name, sampler)


def with_shared_draws(hook: Callable[[], Any], open_stream: Stream) -> Callable[[], Any]:
    """Wraps a hook that builds loaders so that it draws from a stream of its own."""

    def drawing() -> Any:
        with open_stream().drawing():
            return hook()

    return drawing

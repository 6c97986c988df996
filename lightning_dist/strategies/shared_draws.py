"""What decides which rank reads what is drawn alike on all ranks.

Replicas draw different random numbers, so that they augment and drop out differently. But a sampler
that shuffles and takes each second index, or a ``train_dataloader`` that calls ``random_split``,
shares the data out only if all ranks shuffle alike. Both kinds of numbers come from the same global
generators, so the ones for samplers and loader hooks are swapped in while these run.

When torch draws what: creating a DataLoader's iterator calls ``iter`` of its batch sampler, then
draws the base seed of the workers. torch's batch sampler is a generator function: it calls ``iter``
of the sampler, and draws the permutation, when it is asked for its first indices. Without workers
this is in the loader's first ``next``, right before the samples are read and augmented; with
workers it is in the creation, which asks for a few batches in advance. So neither moment could
be seeded as a whole, and the sampler itself is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.strategies.changed_loaders import ChangedLoaders
from lightning_dist.strategies.random_state import RandomStream
from lightning_dist.strategies.shared_reading import share_reading

Stream = Callable[[], RandomStream]


class SharedDraws:
    """A sampler that draws from a stream of its own; its attributes are the sampler's.

    Args:
        sampler: Gives indices, or batches of them.
        open_stream: Called when an epoch's indices begin.
        begin_epoch: Called then too, right before torch draws the seed of the workers.
        begin_reading: Called when the first indices are there, right before samples are read.
    """

    def __init__(
        self,
        sampler: Any,
        open_stream: Stream,
        begin_epoch: Callable[[], None] | None,
        begin_reading: Callable[[], None] | None,
    ) -> None:
        self._sampler = sampler
        self._open_stream = open_stream
        self._begin_epoch = begin_epoch
        self._begin_reading = begin_reading

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        stream = self._open_stream()
        with stream.drawing():
            indices = iter(self._sampler)
        if self._begin_epoch is not None:
            self._begin_epoch()
        return _SharedIndices(indices, stream, self._begin_reading)

    def __len__(self) -> int:
        """Indices, or batches, of an epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Looks a public attribute up, such as ``set_epoch`` or ``batch_size``."""
        return _public_attribute(self._sampler, name)


class _SharedIndices:
    """An epoch's indices; samplers that draw them one by one go on in their stream."""

    def __init__(
        self,
        indices: Iterator[Any],
        stream: RandomStream,
        begin_reading: Callable[[], None] | None,
    ) -> None:
        self._indices = indices
        self._stream = stream
        self._begin_reading = begin_reading

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._stream.drawing():
            indices = next(self._indices)
        begin, self._begin_reading = self._begin_reading, None
        if begin is not None:
            begin()
        return indices

    def __getattr__(self, name: str) -> Any:
        return _public_attribute(self._indices, name)


def _public_attribute(owner: object, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(owner, name)


def share_order(
    loader: object,
    changed: ChangedLoaders,
    open_stream: Stream,
    seed_reader: Callable[[], None] | None,
    seed_alike: Callable[[], None],
) -> None:
    """Makes a loader read in an order that is drawn alike on all ranks.

    Iterable datasets draw their order themselves, while they are read. So do other iterables; what
    their ``__iter__`` draws at once is for the caller to seed.

    Args:
        loader: Changed.
        changed: Remembers what it was.
        open_stream: Gives the numbers of an epoch's order.
        seed_reader: Seeds what this rank draws while it reads: called right before torch draws the
            seed of the loader's workers, or before an early first batch.
        seed_alike: Seeds the global generators alike on all ranks.
    """
    if not isinstance(loader, DataLoader):
        return
    if isinstance(loader.dataset, IterableDataset):
        share_reading(loader, changed, open_stream, seed_alike)
        return
    begin_epoch = seed_reader if loader.num_workers > 0 else None
    # The caller seeds each batch where it is read, but Lightning reads the first one of a loader
    # of unknown length while it creates the iterator.
    is_read_early = loader.num_workers == 0 and sized_len(loader) is None
    begin_reading = seed_reader if is_read_early else None
    changed.wrap_sampler(
        loader, lambda sampler: SharedDraws(sampler, open_stream, begin_epoch, begin_reading)
    )


def with_shared_draws(hook: Callable[[], Any], open_stream: Stream) -> Callable[[], Any]:
    """Makes a hook that builds loaders draw from a stream of its own.

    Args:
        hook: Gives loaders.
        open_stream: Called when the hook is.
    """

    def drawing() -> Any:
        with open_stream().drawing():
            return hook()

    return drawing

"""What is drawn while an iterable dataset is read is drawn alike on all ranks.

Nobody can tell a stream's order from its augmentation: a generator shuffles when it is asked for
its first sample, a shuffle buffer whenever it is asked for one, and both may then give each rank
every second sample. So the numbers of the whole reading are the same everywhere, as under
Lightning's own strategies, and do not depend on what else a rank draws between two batches.

Without workers, torch asks for a batch's indices, reads its samples and collates them, at once:
between the first and the last the reading's own numbers are swapped in. Workers draw from a seed
that torch draws when they are started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader

from lightning_dist.strategies.changed_loaders import ChangedLoaders
from lightning_dist.strategies.random_state import RandomStream


class SharedReading:
    """An iterable dataset's reading, epoch by epoch.

    Args:
        open_stream: Gives the numbers of an epoch, the same on all ranks.
        seed_alike: Seeds the global generators alike on all ranks; ``__iter__`` of the dataset
            draws from them, and torch the workers' seed.
        is_here: Whether this process reads, and no workers do.
    """

    def __init__(
        self, open_stream: Callable[[], RandomStream], seed_alike: Callable[[], None], is_here: bool
    ) -> None:
        self._open_stream = open_stream
        self._seed_alike = seed_alike
        self._is_here = is_here
        self._stream = open_stream()

    def begin_epoch(self) -> None:
        """To be called when torch is about to make the dataset's iterator."""
        self._seed_alike()
        self._stream = self._open_stream()

    def begin_batch(self) -> None:
        """To be called right before a batch's samples are read."""
        if self._is_here:
            self._stream.enter()

    def end_batch(self) -> None:
        """To be called when they are. At the end of the data nobody calls it."""
        self._stream.leave()


class WatchedSampler:
    """A sampler that says when it is read; its public attributes are the sampler's.

    Args:
        sampler: Gives what stands for indices.
        reading: Is told.
    """

    def __init__(self, sampler: Any, reading: SharedReading) -> None:
        self._sampler = sampler
        self._reading = reading

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        self._reading.begin_epoch()
        return self._indices()

    def _indices(self) -> Iterator[Any]:
        for indices in self._sampler:
            self._reading.begin_batch()
            yield indices

    def __len__(self) -> int:
        """Indices, or batches, of an epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Looks a public attribute up, such as ``batch_size``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def share_reading(
    loader: DataLoader[Any],
    changed: ChangedLoaders,
    open_stream: Callable[[], RandomStream],
    seed_alike: Callable[[], None],
) -> None:
    """Makes all ranks draw alike while they read an iterable dataset.

    Args:
        loader: Of an iterable dataset; changed.
        changed: Remembers what it was.
        open_stream: As for :class:`SharedReading`.
        seed_alike: As for :class:`SharedReading`.
    """
    is_here = loader.num_workers == 0
    reading = SharedReading(open_stream, seed_alike, is_here)
    changed.wrap_sampler(loader, lambda sampler: WatchedSampler(sampler, reading))
    if is_here:  # workers may have to pickle it, and have nothing to end
        changed.replace(loader, "collate_fn", _ending_batches(loader.collate_fn, reading))


def _ending_batches(
    collate: Callable[[list[Any]], Any], reading: SharedReading
) -> Callable[[list[Any]], Any]:
    @wraps(collate)
    def collate_and_end(samples: list[Any]) -> Any:
        batch = collate(samples)
        reading.end_batch()
        return batch

    return collate_and_end

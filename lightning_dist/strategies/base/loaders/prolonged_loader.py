"""A loader as long as the longest of all ranks.

Lightning ends an epoch, validates, steps the schedulers and saves by the number of batches. If
every rank counts as many, none of this needs to know that some ranks have run out of data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_dist.strategies.base.loaders.loader_proxy import LoaderProxy


class ProlongedLoader(LoaderProxy):
    """Gives a loader's batches, and then its last one again and again.

    Args:
        loader: Of known length, at least 1. Its public attributes are this one's too.
        length: Batches to give, at least the loader's own.

    Attributes:
        position: Place in the epoch of the batch that was given last.
    """

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length
        self.position = -1

    @override
    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Gives the batches of an epoch.

        Raises:
            ValueError: The loader ends before its length.
        """
        own = len(self._loader)
        iterator = iter(self._loader)
        batch: Any = None
        for position in range(self._length):
            if position < own:
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise ValueError(
                        f"The training loader says that it has {own} batches and ended after"
                        f" {position}. uneven_inputs=True relies on its length."
                    ) from None
            self.position = position
            yield batch

    @property
    def has_own_batch(self) -> bool:
        """Whether the batch that was given last is not a repetition."""
        return self.position < len(self._loader)

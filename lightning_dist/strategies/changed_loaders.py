"""What stands in the place of parts of a user's loaders, until they get their own back.

Loaders may be made anew in each epoch. One that nobody reads any more needs nothing back, and must
not be held: with it would stay its data and its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from lightning_dist.strategies.lightning_private import replace_in_loader


class ChangedLoaders:
    """Remembers what loaders had, for as long as there are these loaders."""

    def __init__(self) -> None:
        self._own: WeakKeyDictionary[DataLoader[Any], list[tuple[str, Any]]] = WeakKeyDictionary()

    def wrap_sampler(self, loader: DataLoader[Any], wrap: Callable[[Any], Any]) -> None:
        """Wraps what a loader takes its indices from: its batch sampler, or else its sampler.

        Args:
            loader: Changed.
            wrap: Gives the one to use for the loader's own.
        """
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.replace(loader, name, wrap(getattr(loader, name)))

    def replace(self, loader: DataLoader[Any], name: str, value: Any) -> None:
        """Replaces a part of a loader.

        Args:
            loader: Changed.
            name: Of the attribute.
            value: Must not hold the loader.
        """
        own = replace_in_loader(loader, name, value)
        self._own.setdefault(loader, []).append((name, own))

    def undo(self) -> None:
        """Gives the loaders that there still are their own parts back."""
        for loader, replaced in self._own.items():
            for name, own in reversed(replaced):  # one loader may have been changed twice
                replace_in_loader(loader, name, own)
        self._own.clear()

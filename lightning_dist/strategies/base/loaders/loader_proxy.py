"""A loader that stands in for another one, and looks like it to Lightning and to users' code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoaderProxy:
    """Base of loaders that stand in for another one; a subclass has ``__iter__``."""

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        if self.has_state:  # only then: Lightning asks whether there are these attributes
            self.state_dict = loader.state_dict
            self.load_state_dict = loader.load_state_dict

    @property
    def has_state(self) -> bool:
        """Whether the loader can go on inside of an epoch."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Returns a public attribute of the loader, such as its sampler or its dataset."""
        if name.startswith("_"):  # code that sets a private name must set it on the loader itself
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a public attribute of the loader, such as a sampler's batch size, on the loader."""
        is_own = hasattr(type(self), name) or name in LoaderProxy.__annotations__
        if name.startswith("_") or is_own or not hasattr(self._loader, name):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    @property
    def _iterator(self) -> Any:
        """The iterator that torch's loader keeps; Lightning ends its workers."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

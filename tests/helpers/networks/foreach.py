"""Optimizers that update as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest


@contextmanager
def foreach_by_default() -> Iterator[None]:
    """Lets torch's optimizers choose ``foreach`` by themselves, as for the tensors of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        module = import_module("torch.optim.optimizer")
        patch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
        yield

"""The stream of a GPU on which a server computes in a worker's process.

On the worker's own stream, a server's work would queue behind the worker's collectives. These wait
for other workers, and those for the server.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.tensors.tree import tensors_in


class OwnStream:
    """A stream beside the one on which the process's worker computes; a CPU needs none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = None if device.type == "cpu" else torch.get_device_module(device)
        self._own = None if self._streams is None else self._streams.Stream(device=device)

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which this thread computes on the stream."""
        return nullcontext() if self._streams is None else self._streams.stream(self._own)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Enters the stream for work between what the caller has put on its own stream and will."""
        if self._streams is None or self._own is None:
            yield
            return
        callers = self._streams.current_stream(self._device)
        self._own.wait_stream(callers)
        with self.entered():
            yield
        callers.wait_stream(self._own)

    def channel(self) -> MemoryChannel:
        """Creates a channel between threads of this process, where one is on the stream."""
        return MemoryChannel() if self._streams is None else _SettledChannel(self._device)


class _SettledChannel(MemoryChannel):
    """Between threads on streams of their own: what is sent has been computed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._streams = torch.get_device_module(device)

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        # The host waits, for the sender is about to wait for the answer, or has just given it.
        self._streams.current_stream(self._device).synchronize()
        super().send(tree, tag=tag, key=key)

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        tree = super().receive(tag=tag, key=key)
        current = self._streams.current_stream(self._device)
        for tensor in tensors_in(tree):
            if tensor.device.type == self._device.type:  # a group may have tensors on the host
                tensor.record_stream(current)  # else its memory is used again by the sender
        return tree

"""The threads of a server in a worker's process, one for each worker, and their stream of a GPU.

Lightning runs ``fit`` in each process, and a process that only served would have to take part in
its loops all the same. So a server is a guest of a worker's process. Its threads mostly wait, and
torch's operations release the interpreter. On the worker's own stream, a server's work would queue
behind the worker's collectives. These wait for other workers, and those for the server.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lightning_dist.engine.comms.channel import (
    ChannelClosedError,
    MemoryChannel,
    PeerLostError,
    Receiver,
    Sender,
)
from lightning_dist.engine.comms.in_flight import CLOSE_SECONDS
from lightning_dist.engine.data_parallel.server.messages import Reply
from lightning_dist.engine.data_parallel.server.server import ParameterServer
from lightning_dist.engine.tensors.tree import flatten


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
        for tensor in flatten(tree)[0]:
            if tensor.device.type == self._device.type:  # a group may have tensors on the host
                tensor.record_stream(current)  # else its memory is used again by the sender
        return tree


class Serving:
    """Answers the workers of one server, over channels from each worker and back."""

    def __init__(
        self,
        server: ParameterServer,
        rank: int,
        channels: Mapping[int, tuple[Receiver, Sender]],
        stream: OwnStream,
        *,
        outlives_workers: bool,
    ) -> None:
        self._server = server
        self._rank = rank
        self._channels = channels
        self._stream = stream
        self._outlives_workers = outlives_workers
        self._threads = [
            threading.Thread(
                target=self._serve, args=(worker,), name=f"serve-{worker}", daemon=True
            )
            for worker in channels
        ]
        for thread in self._threads:
            thread.start()

    def close(self, *, failed: bool) -> None:
        """Waits until all workers have said goodbye."""
        if failed:
            self._server.fail("The run has failed.")
        for receiver, _ in self._channels.values():
            if isinstance(receiver, MemoryChannel):  # this rank's own
                receiver.interrupt(ChannelClosedError("This rank has closed its session."))
        for thread in () if failed else self._threads:
            thread.join(CLOSE_SECONDS)
        for receiver, sender in self._channels.values():
            sender.close(failed=failed)
            receiver.close(failed=failed)

    def _serve(self, worker: int) -> None:
        receiver, sender = self._channels[worker]
        try:
            with self._stream.entered():
                while True:
                    sender.send(self._answer(worker, receiver.receive()))
        except ChannelClosedError:
            return
        except PeerLostError:
            if self._outlives_workers:
                self._server.lose(worker)
        except Exception as error:  # else the worker would wait for ever
            sender.send(self._failed(error))

    def _answer(self, worker: int, request: object) -> Reply:
        try:
            return self._server.answer(worker, request)  # type: ignore[arg-type]
        except Exception as error:  # each worker must learn of it
            return self._failed(error)

    def _failed(self, error: Exception) -> Reply:
        text = f"The server of rank {self._rank} failed: {type(error).__name__}: {error}"
        return Reply([], failure=self._server.fail(text))

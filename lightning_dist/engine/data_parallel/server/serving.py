"""The threads of a server in a worker's process, one for each worker.

Lightning runs ``fit`` in each process, and a process that only served would have to take part in
its loops all the same. So a server is a guest of a worker's process. Its threads mostly wait, and
torch's operations release the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from lightning_dist.engine.comms.channel import (
    ChannelClosedError,
    MemoryChannel,
    PeerLostError,
    Receiver,
    Sender,
)
from lightning_dist.engine.comms.in_flight import CLOSE_SECONDS
from lightning_dist.engine.data_parallel.server.messages import Reply
from lightning_dist.engine.data_parallel.server.own_stream import OwnStream
from lightning_dist.engine.data_parallel.server.server import ParameterServer


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

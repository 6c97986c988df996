"""A server's threads compute on a stream of their own: with streams that only note what is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.data_parallel.server.messages import Meet, Reply
from lightning_dist.engine.data_parallel.server.own_stream import OwnStream
from lightning_dist.engine.data_parallel.server.serving import Serving

GPU = torch.device("cuda", 0)


class NotedStreams:
    """Stands for ``torch.cuda``: a thread's current stream by name, and what was done."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._current = threading.local()

    @property
    def name(self) -> str:
        return getattr(self._current, "name", "default")

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802
        return self._stream("own")

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            synchronize=lambda: self.notes.append(f"{name} is awaited"),
            wait_stream=lambda other: self.notes.append(f"{name} waits for {other.name}"),
        )

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self._current.name = self.name, stream.name
        yield
        self._current.name = before

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream(self.name)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    noted = NotedStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: noted)
    return noted


def test_threads_answer_on_the_own_stream_and_settle_what_they_send(streams: NotedStreams) -> None:
    stream = OwnStream(GPU)
    asked, answered = stream.channel(), stream.channel()
    seen: list[str] = []

    class Server:
        def answer(self, worker: int, request: object) -> Reply:
            seen.append(streams.name)
            return Reply([])

        def fail(self, text: str) -> str:
            return text

    serving = Serving(Server(), 0, {0: (asked, answered)}, stream, outlives_workers=False)  # type: ignore[arg-type]
    asked.send(Meet(drains=False))
    assert answered.receive().weights == []
    assert seen == ["own"]
    assert streams.notes == ["default is awaited", "own is awaited"]
    serving.close(failed=False)


def test_a_worker_learns_of_whatever_ends_its_thread() -> None:
    class Broken(MemoryChannel):
        def receive(self, **_: object) -> object:
            raise NotImplementedError("no kernel for this")

    class Server:
        def fail(self, text: str) -> str:
            return text

    stream, answered = OwnStream(torch.device("cpu")), MemoryChannel()
    channels = {0: (Broken(), answered)}
    serving = Serving(Server(), 3, channels, stream, outlives_workers=False)  # type: ignore[arg-type]
    failure = answered.receive().failure
    assert failure == "The server of rank 3 failed: NotImplementedError: no kernel for this"
    serving.close(failed=True)


def test_work_in_turn_comes_behind_the_callers_and_ahead_of_it(streams: NotedStreams) -> None:
    with OwnStream(GPU).in_turn():
        streams.notes.append(f"works on {streams.name}")
    assert streams.notes == ["own waits for default", "works on own", "default waits for own"]


def test_what_is_received_is_kept_for_the_receivers_stream(
    streams: NotedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, str]] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: kept.append((len(tensor), stream.name))
    )
    channel = OwnStream(torch.device("meta")).channel()  # stands for a GPU with tensors on it
    channel.send([torch.ones(2, device="meta"), torch.ones(3)])
    channel.receive()
    assert kept == [(2, "default")]  # nothing but a GPU's memory belongs to a stream


def test_a_cpu_has_no_streams() -> None:
    stream = OwnStream(torch.device("cpu"))
    with stream.in_turn(), stream.entered():
        assert type(stream.channel()) is MemoryChannel

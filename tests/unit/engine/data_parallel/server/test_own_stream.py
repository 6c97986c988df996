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
        wait = lambda other: self.notes.append(f"own waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name="own", wait_stream=wait)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self._current.name = self.name, stream.name
        yield
        self._current.name = before

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        name = self.name
        return SimpleNamespace(
            name=name, synchronize=lambda: self.notes.append(f"{name} is awaited")
        )


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


def test_the_stream_follows_its_caller(streams: NotedStreams) -> None:
    OwnStream(GPU).follow()
    assert streams.notes == ["own waits for default"]


def test_what_is_received_is_kept_for_the_receivers_stream(
    streams: NotedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: kept.append(stream.name))
    channel = OwnStream(GPU).channel()
    channel.send([torch.ones(2), torch.ones(3)])
    channel.receive()
    assert kept == ["default", "default"]


def test_a_cpu_has_no_streams() -> None:
    stream = OwnStream(torch.device("cpu"))
    stream.follow()
    with stream.entered():
        assert type(stream.channel()) is MemoryChannel

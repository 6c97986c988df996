"""What counts as a standstill, and how it is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.comms.failures.heartbeat import (
    Beat,
    Pulse,
    RankProcess,
    Resumption,
    Rhythm,
    Silence,
    Standstill,
)

RHYTHM = Rhythm(interval_seconds=2, patience_seconds=6, limit_seconds=10)
PROCESS = RankProcess(1, "far-away", 4711)


def test_a_long_timeout_lets_a_rank_be_missed_after_half_a_minute() -> None:
    assert Rhythm.for_timeout(1800) == Rhythm(5, 30, 1800)


def test_a_short_timeout_lets_a_rank_be_missed_before_it_is_over() -> None:
    assert Rhythm.for_timeout(12) == Rhythm(1, 6, 12)


def test_a_silent_rank_is_reported_once_and_its_return_too() -> None:
    silence = Silence(RHYTHM, 1)
    beat = Beat(PROCESS, "training.")
    assert silence.heard(beat) is None
    assert [silence.missed() for _ in range(2)] == [None, None]
    assert silence.missed() == Standstill(PROCESS, "training.", 6, True)
    assert silence.missed() is None
    assert not silence.is_over
    assert silence.missed() is None
    assert silence.is_over
    assert silence.heard(beat) == Resumption(PROCESS, 10)
    assert silence.heard(beat) is None
    assert not silence.is_over


def test_short_silences_do_not_add_up() -> None:
    silence = Silence(RHYTHM, 1)
    for _ in range(10):
        assert silence.missed() is None
        assert silence.missed() is None
        assert silence.heard(Beat(PROCESS, "training.")) is None


def test_a_rank_that_never_answered_is_named_by_its_number() -> None:
    assert "Rank 3" in str(Silence(RHYTHM, 3).standstill)


def test_texts_name_rank_host_process_and_activity() -> None:
    for standstill in (
        Standstill(PROCESS, "saving x.ckpt, in `fsync` (files.py:3).", 30.4, is_silent=True),
        Standstill(PROCESS, "saving x.ckpt, in `fsync` (files.py:3).", 30.4, is_silent=False),
    ):
        text = str(standstill)
        for part in ("Rank 1", "far-away", "4711", "30 s", "saving x.ckpt", "fsync"):
            assert part in text
    assert str(Resumption(PROCESS, 41)) == "Rank 1 (process 4711 on far-away) goes on after 41 s."


# --- the watched thread ---------------------------------------------------------------------------


@contextmanager
def waiting(wait: Callable[[], object]) -> Iterator[Pulse]:
    """Runs a function on another thread, and watches it while it waits."""
    pulses: list[Pulse] = []

    def run() -> None:
        pulses.append(Pulse(RHYTHM, PROCESS, lambda: "training"))
        wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.05)
    yield pulses[0]


def news_of(pulse: Pulse, intervals: int) -> list[str]:
    return [type(pulse.look()[1]).__name__ for _ in range(intervals)]


def use_processor(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_thread_in_users_code_is_reported_once_until_it_computes_again() -> None:
    done = threading.Event()
    with waiting(lambda: done.wait()) as pulse:
        assert news_of(pulse, 4) == ["NoneType", "NoneType", "Standstill", "NoneType"]
        activity = pulse.look()[0].activity
        assert activity.startswith("training, in `wait` (threading.py:")
        assert "called in `<lambda>` (test_heartbeat.py:" in activity
        use_processor(0.25)
        assert news_of(pulse, 2) == ["Resumption", "NoneType"]
        done.set()


def test_a_thread_that_computes_is_never_reported() -> None:
    done = threading.Event()
    with waiting(lambda: done.wait()) as pulse:  # another one of its process computes
        for _ in range(4):
            use_processor(0.21)
            assert news_of(pulse, 1) == ["NoneType"]
        done.set()


def test_a_thread_that_waits_for_a_message_of_another_rank_is_never_reported() -> None:
    channel = MemoryChannel()
    with waiting(lambda: channel.receive()) as pulse:
        assert news_of(pulse, 5) == ["NoneType"] * 5
        channel.send(1)


def test_a_thread_that_waits_for_a_file_in_torch_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def load() -> None:
        with pytest.raises(OSError, match="seek"):  # it is no file, after all
            torch.load(path)

    with waiting(load) as pulse:
        assert news_of(pulse, 3)[-1] == "Standstill"
        assert "(serialization.py:" in pulse.look()[0].activity
        path.write_bytes(b"")


def test_a_child_is_killed_and_no_other_process() -> None:
    host = socket.gethostname()
    child = subprocess.Popen(["sleep", "60"])
    os.kill(child.pid, signal.SIGSTOP)
    RankProcess(1, "elsewhere", child.pid).kill_child()
    RankProcess(1, host, os.getppid()).kill_child()  # else the tests end here
    assert child.poll() is None
    RankProcess(1, host, child.pid).kill_child()
    assert child.wait(5) == -signal.SIGKILL

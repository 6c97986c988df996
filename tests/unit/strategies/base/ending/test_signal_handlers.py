"""What signals do while a run lasts, and behind it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.ending.signal_handlers import (
    FlagHandler,
    InterruptHandler,
    requeue_signal,
)
from tests.helpers.networks.models import make_trainer


def test_the_second_ctrl_c_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_boundary = False
    try:
        handler = InterruptHandler(make_trainer(), lambda: has_boundary)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        has_boundary = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        handler.remove()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_comes_again_at_once_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a launcher that signals a process and its group."""
    told: list[bytes] = []

    def write(_: int, text: bytes) -> None:
        told.append(text)
        if len(told) < 3:
            signal.raise_signal(signal.SIGTERM)

    handler = FlagHandler(make_trainer(), signal.SIGTERM, lambda: None)
    monkeypatch.setattr(os, "write", write)
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        handler.remove()
    assert told == [b"[rank 0] SIGTERM: all ranks stop at a coming batch.\n"]


def test_sigterm_is_ours_and_the_users_before_and_with_lightnings_handlers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trainer = make_trainer()
    capfd.readouterr()
    ours: list[str] = []
    users: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: users.append("signal"))
    try:
        handler = FlagHandler(trainer, signal.SIGTERM, lambda: ours.append("signal"))
        signal.raise_signal(signal.SIGTERM)
        assert ours == users == ["signal"]
        assert capfd.readouterr().err == "[rank 0] SIGTERM: all ranks stop at a coming batch.\n"
        lightning_internals.replace_sigterm_protocol(trainer, lambda: None)
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        assert ours == users == ["signal"] * 2
        assert capfd.readouterr().err == ""
        handler.remove()
        signal.raise_signal(signal.SIGTERM)
        trainer._signal_connector.teardown()
        signal.raise_signal(signal.SIGTERM)
        assert (ours, users) == (["signal"] * 2, ["signal"] * 4)
    finally:
        signal.signal(signal.SIGTERM, before)


def sleep_on() -> None:
    while True:  # not for ever at once: a signal may come before
        time.sleep(0.01)


def test_sigterm_alone_ends_what_was_forked_during_a_run() -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1)
    handlers = [FlagHandler(make_trainer(), signum, lambda: None) for signum in signals]
    try:
        context = multiprocessing.get_context("fork")
        runs = context.Event()  # until it does, Python drops the signals of a forked process
        child = context.Process(target=lambda: (runs.set(), sleep_on()))
        child.start()
        assert runs.wait(10)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGUSR1)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
        for handler in handlers:
            handler.remove()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, signal.SIGUSR1),
        ({"requeue_signal": signal.SIGHUP}, signal.SIGHUP),
        ({"auto_requeue": False}, None),
    ],
)
def test_slurms_signal_is_handled_if_lightning_is_to_requeue(
    options: dict[str, Any], expected: signal.Signals | None
) -> None:
    trainer = make_trainer()
    assert requeue_signal(trainer) is None
    environment = SLURMEnvironment(**options)
    trainer.strategy.cluster_environment = environment
    assert requeue_signal(trainer) is expected

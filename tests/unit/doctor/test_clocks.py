from __future__ import annotations

import os
import shutil
import signal

import pytest

from lightning_dist.doctor.clocks import check_restarts, check_signals, judge_clock
from lightning_dist.doctor.report import Status
from tests.unit.doctor.facts import ONE_HOST


def test_a_clock_that_is_off_is_a_warning() -> None:
    assert judge_clock(-0.2).status is Status.OK
    result = judge_clock(5.0)
    assert result.status is Status.WARN
    assert "+5.0 s from rank 0's" in result.found


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_signal_that_does_not_arrive_is_found(how: str) -> None:
    assert "SIGUSR1 does not" not in check_signals(ONE_HOST).found
    if how == "ignored":
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        result = check_signals(ONE_HOST)
    finally:
        if how == "ignored":
            signal.signal(signal.SIGUSR1, before)
        else:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert result.status is Status.WARN
    assert "SIGUSR1 does not reach" in result.found


def test_the_first_process_of_a_container_and_a_missing_command_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A shell's job in the background ignores SIGINT.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert check_signals(ONE_HOST).status is Status.OK
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "scontrol" in check_signals(ONE_HOST).found
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert "--init" in check_signals(ONE_HOST).remedy


def test_restarts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    assert "does not restart" in check_restarts(ONE_HOST).found
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "up to 3 times" in check_restarts(ONE_HOST).found
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert check_restarts(ONE_HOST).status is Status.WARN

from __future__ import annotations

import signal

import pytest

from lightning_dist.doctor.clocks import (
    SignalFacts,
    judge_clocks,
    judge_restarts,
    judge_signals,
    probe_signals,
)
from lightning_dist.doctor.result import Status
from lightning_dist.engine.profiling.record import ClockOffset
from tests.unit.doctor.facts import ONE_HOST, TWO_HOSTS


def test_a_clock_that_is_off_is_named_by_its_host() -> None:
    fine = [ClockOffset(), ClockOffset(), ClockOffset(0.01), ClockOffset(-0.2)]
    assert judge_clocks(TWO_HOSTS, {0: fine}).status is Status.OK
    ahead = [ClockOffset(), ClockOffset(), ClockOffset(5.0), ClockOffset(5.0)]
    result = judge_clocks(TWO_HOSTS, {0: ahead})
    assert result.status is Status.WARN
    assert "rank 0's: b by +5.0 s" in result.found


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_signal_that_does_not_arrive_is_found(how: str) -> None:
    already = set(probe_signals(ONE_HOST).deaf)  # of a shell's job in the background, SIGINT
    if how == "ignored":
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        facts = probe_signals(ONE_HOST)
    finally:
        if how == "ignored":
            signal.signal(signal.SIGUSR1, before)
        else:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert set(facts.deaf) - already == {"SIGUSR1"}
    assert "SIGUSR1 does not reach" in judge_signals(ONE_HOST, facts).found


def test_the_first_process_of_a_container_and_a_missing_command_are_found() -> None:
    assert judge_signals(ONE_HOST, SignalFacts((), False, False)).status is Status.OK
    assert "--init" in judge_signals(ONE_HOST, SignalFacts((), True, False)).remedy
    assert "scontrol" in judge_signals(ONE_HOST, SignalFacts((), False, True)).found


def test_restarts_are_told() -> None:
    assert judge_restarts(ONE_HOST, (0, 0)).status is Status.OK
    assert "up to 3 times" in judge_restarts(ONE_HOST, (0, 3)).found
    assert judge_restarts(ONE_HOST, (1, 3)).status is Status.WARN

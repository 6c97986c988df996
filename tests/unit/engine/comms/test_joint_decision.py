"""Ranks as threads: none waits but for an answer that it needs, and all decide alike."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.votes import JointDecision

NUM_RANKS = 3


class Round:
    """The votes of one all-reduce."""

    def __init__(self) -> None:
        self.votes: list[Tensor] = []
        self.complete = threading.Event()


class Work:
    def __init__(self, votes: Round, own: Tensor) -> None:
        self.votes, self.own = votes, own

    def wait(self) -> None:
        assert self.votes.complete.wait(5), "a rank waits for a vote that nobody casts"
        self.own.copy_(torch.stack(self.votes.votes).sum(0))


class Group:
    """What one rank sees of the votes."""

    def __init__(self, rounds: list[Round], lock: threading.Lock) -> None:
        self.rounds, self.lock = rounds, lock
        self.place = 0

    def all_reduce(self, own: Tensor) -> Work:
        with self.lock:
            if self.place == len(self.rounds):
                self.rounds.append(Round())
            votes = self.rounds[self.place]
            self.place += 1
            votes.votes.append(own.clone())
            if len(votes.votes) == NUM_RANKS:
                votes.complete.set()
        return Work(votes, own)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "all_reduce", lambda own, group, **_: group.all_reduce(own))
    monkeypatch.setattr(dist, "get_world_size", lambda group: NUM_RANKS)
    rounds, lock = [Round()][:0], threading.Lock()
    return [Group(rounds, lock) for _ in range(NUM_RANKS)]


def decide_on_all(
    groups: list[Any], wishes: list[list[bool]], ends: str, lag: int = 1
) -> list[list[bool]]:
    def decide(rank: int) -> list[bool]:
        decision = JointDecision(groups[rank], lag)
        found = [decision.at_boundary(wanted) for wanted in wishes[rank]]
        if ends == "forget":
            decision.forget()
        return [*found, decision.decide_now(False)]

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(decide, range(NUM_RANKS)))


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_all_decide_alike_at_once_or_some_boundaries_later(
    groups: list[Any], seed: int, lag: int
) -> None:
    draws = random.Random(seed)
    likely = draws.choice([0.1, 0.5, 0.9])
    wishes = [[draws.random() < likely for _ in range(30)] for _ in range(NUM_RANKS)]
    expected: list[bool] = []
    pending: list[bool] = []  # whether some wanted it, by boundary
    for column in zip(*wishes, strict=True):
        is_due = len(pending) == lag and pending.pop(0)
        expected.append(is_due or all(column))
        pending = [] if expected[-1] else [*pending, any(column)]
    found = decide_on_all(groups, wishes, "decide_now", lag)
    assert found == [[*expected, any(pending)]] * NUM_RANKS
    assert any(expected)


def test_what_is_forgotten_is_not_done(groups: list[Any]) -> None:
    wishes = [[True], [False], [False]]
    assert decide_on_all(groups, wishes, "forget") == [[False, False]] * NUM_RANKS


@pytest.mark.parametrize("lag", [1, 3])
def test_a_rank_ahead_that_wants_nothing_does_not_wait(groups: list[Any], lag: int) -> None:
    decision = JointDecision(groups[0], lag)
    assert not any(decision.at_boundary(False) for _ in range(lag))
    assert [len(votes.votes) for votes in groups[0].rounds] == [1] * lag

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

from lightning_dist.strategies.joint_decision import JointDecision

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


def decide_on_all(groups: list[Any], wishes: list[list[bool]], ends: str) -> list[list[bool]]:
    def decide(rank: int) -> list[bool]:
        decision = JointDecision(groups[rank])
        found = [decision.at_boundary(wanted) for wanted in wishes[rank]]
        if ends == "forget":
            decision.forget()
        return [*found, decision.settle(False)]

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(decide, range(NUM_RANKS)))


@pytest.mark.parametrize("seed", range(8))
def test_all_decide_alike_at_once_or_a_boundary_later(groups: list[Any], seed: int) -> None:
    draws = random.Random(seed)
    likely = draws.choice([0.1, 0.5, 0.9])
    wishes = [[draws.random() < likely for _ in range(30)] for _ in range(NUM_RANKS)]
    expected: list[bool] = []
    pending = False
    for column in zip(*wishes, strict=True):
        expected.append(pending or all(column))
        pending = not expected[-1] and any(column)
    assert decide_on_all(groups, wishes, "settle") == [[*expected, pending]] * NUM_RANKS
    assert any(expected)


def test_what_is_forgotten_is_not_done(groups: list[Any]) -> None:
    wishes = [[True], [False], [False]]
    assert decide_on_all(groups, wishes, "forget") == [[False, False]] * NUM_RANKS


def test_nobody_waits_who_wants_nothing(groups: list[Any]) -> None:
    decision = JointDecision(groups[0])
    assert not decision.at_boundary(False)
    assert len(groups[0].rounds[0].votes) == 1

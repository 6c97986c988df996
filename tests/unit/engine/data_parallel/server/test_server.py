"""A server, its workers being threads: clocks, bounds, decisions and workers that are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.data_parallel.server.messages import Meet, Push, Reply, ServerOptions
from lightning_dist.engine.data_parallel.server.server import ParameterServer
from lightning_dist.engine.data_parallel.server.shard import Partition, ShardOptimizer
from lightning_dist.engine.data_parallel.server.stops import Decisions

BRIEF = 0.1
GROUPS: list[dict[str, Any]] = [{"lr": 1.0}]


def in_thread(function: Callable[..., Reply], *args: Any) -> Future[Reply]:
    """Calls a function in a thread that does not outlive the tests, if one of them fails."""
    answer: Future[Reply] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


class Served:
    """A server of one weight, with SGD of rate 1."""

    def __init__(self, num_workers: int, **options: Any) -> None:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        self.shard = ShardOptimizer(optimizer)
        self.shard.follow(optimizer, [weight])
        self.server = ParameterServer(self.shard, ServerOptions(**options), range(num_workers))
        self.server.open()

    def push(
        self, worker: int, value: float | None, *asked: int, written: float | None = None
    ) -> Future[Reply]:
        gradient: Tensor | None = None if value is None else torch.tensor(value)
        push = Push([gradient], GROUPS, asked, tensors(written))
        return in_thread(self.server.answer, worker, push)

    def meet(
        self, worker: int, drains: bool = False, written: float | None = None
    ) -> Future[Reply]:
        meet = Meet(drains, tensors(written))
        return in_thread(self.server.answer, worker, meet)


def tensors(value: float | None) -> list[Tensor]:
    return [] if value is None else [torch.tensor(value)]


def weight_of(reply: Future[Reply]) -> float:
    (weight,) = reply.result(5).weights
    return float(weight)


def is_waiting(reply: Future[Reply]) -> bool:
    return not wait_for([reply], BRIEF).done


def test_in_step_it_waits_for_all_and_takes_the_mean() -> None:
    served = Served(2)
    first = served.push(1, 3.0)
    assert is_waiting(first)
    second = served.push(0, None)
    assert weight_of(first) == weight_of(second) == -1.5


def test_in_step_it_takes_what_hooks_have_written_when_all_have_the_last_answer() -> None:
    served = Served(2)
    first = served.push(0, 1.0, written=10.0)
    assert is_waiting(first)
    assert float(served.shard.weights[0].detach()) == 0.0  # which worker 1 may not have yet
    assert weight_of(served.push(1, 3.0)) == weight_of(first) == 8.0
    first = served.meet(0, drains=True, written=5.0)
    assert is_waiting(first)
    assert float(served.shard.weights[0].detach()) == 8.0
    assert weight_of(served.meet(1, drains=True)) == weight_of(first) == 5.0


def test_out_of_step_each_gradient_counts_at_once() -> None:
    served = Served(2, mode="async")
    assert [weight_of(served.push(1, 1.0)) for _ in range(9)][-1] == -9.0


def test_a_worker_is_held_at_the_bound() -> None:
    served = Served(2, mode="bounded", max_staleness=2)
    assert [weight_of(served.push(0, 1.0)) for _ in range(2)] == [-1.0, -2.0]
    third = served.push(0, 1.0)
    assert is_waiting(third)
    assert weight_of(served.push(1, 10.0)) == weight_of(third) == -13.0


def test_a_compensated_gradient_knows_what_came_between() -> None:
    served = Served(2, mode="async", compensation="dc-asgd", compensation_strength=0.5)
    assert weight_of(served.push(0, 1.0)) == -1.0
    # Worker 1 has computed with 0; now it is -1: 2 + 0.5 * 2 * 2 * (-1 - 0) = 0.
    assert weight_of(served.push(1, 2.0)) == -1.0
    assert weight_of(served.push(1, 2.0)) == -3.0


def test_after_a_drain_pushes_wait_until_it_opens() -> None:
    served = Served(2, mode="async")
    replies = [served.meet(0, drains=True), served.meet(1, drains=True)]
    assert [weight_of(reply) for reply in replies] == [0.0, 0.0]
    early = served.push(1, 1.0)
    assert is_waiting(early)
    served.server.open()
    assert weight_of(early) == -1.0


@pytest.mark.parametrize("drains", [False, True])
def test_a_meeting_goes_on_without_a_worker_that_is_lost(drains: bool) -> None:
    served = Served(3, mode="async")
    replies = [served.meet(worker, drains) for worker in (0, 1)]
    assert is_waiting(replies[0])
    served.server.lose(2)
    living = () if drains else (0, 1)
    assert [reply.result(5).living for reply in replies] == [living] * 2


def test_all_workers_obey_at_the_same_update() -> None:
    served, stop = Served(2, mode="async"), 7
    workers = [Decisions(), Decisions()]

    def step(worker: int, *asked: int) -> bool:
        workers[worker].end_update()
        workers[worker].learn(served.push(worker, 1.0, *asked).result(5).due)
        return workers[worker].is_due(stop)

    assert not any(step(0) for _ in range(3))
    assert not step(1, stop)  # is one update old, and worker 0 three
    assert [step(0) for _ in range(2)] == [True, False]
    assert [step(1) for _ in range(4)] == [False, False, True, False]


def test_what_is_settled_where_all_meet_is_not_obeyed_later() -> None:
    served, stop = Served(2, mode="async"), 7
    assert served.push(0, 1.0, stop).result(5).due == {stop: 2}
    workers = [Decisions(), Decisions()]
    for decisions, reply in zip(workers, [served.meet(0), served.meet(1)], strict=True):
        decisions.learn(reply.result(5).due)
        decisions.forget(stop)
    for _ in range(3):
        workers[1].end_update()
        workers[1].learn(served.push(1, 1.0).result(5).due)
        assert not workers[1].is_due(stop)


def test_a_failure_ends_all_waits() -> None:
    served = Served(2)
    reply = served.push(0, 1.0)
    served.server.fail("no more")
    with pytest.raises(RuntimeError, match="no more"):
        reply.result(5)


def test_parameters_are_shared_out_by_their_size() -> None:
    sizes = [10, 1, 4, 5, 2]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    partition = Partition(2)
    partition.extend(torch.optim.SGD(parameters, lr=1.0))
    assert [[p.numel() for p in shard] for shard in partition.shards] == [[10, 1], [5, 4, 2]]
    late = nn.Parameter(torch.zeros(1))
    partition.extend(torch.optim.SGD([*parameters, late], lr=1.0))
    assert partition.shards[0][-1] is late or partition.shards[1][-1] is late
    assert sum(map(len, partition.shards)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "lazy"}, "mode='lazy' is unknown; use one of .*'bounded'"),
        ({"num_servers": 0}, "num_servers=0 must be an integer of at least 1"),
        ({"mode": "bounded"}, "mode='bounded' with max_staleness=None"),
        ({"mode": "async", "max_staleness": 2}, "mode='async' with max_staleness=2"),
        ({"mode": "bounded", "max_staleness": -1}, "max_staleness=-1 must be .* at least 0"),
        ({"mode": "async", "compensation": "dc"}, "compensation='dc' is unknown; use .*'dc-asgd'"),
        ({"compensation": "dc-asgd"}, "'dc-asgd' has nothing to correct with mode='sync'"),
        (
            {"mode": "async", "compensation_strength": float("nan")},
            "compensation_strength=nan must be a number above 0",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerOptions(**options)

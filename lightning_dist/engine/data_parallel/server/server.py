"""One server: it steps on what workers push, and sends them weights.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014). Workers
push gradients, and the optimizer and its state are at the server. The answer to a push is a pull.
With a bound on the clocks it is stale synchronous parallel (Ho et al., NeurIPS 2013). The
compensation is that of Zheng et al. (ICML 2017, arXiv 1609.08326) with a constant factor: the
server remembers which weights it has sent to a worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dist.engine.data_parallel.server.messages import (
    Arrival,
    Meet,
    Push,
    Reply,
    ServerOptions,
)
from lightning_dist.engine.data_parallel.server.shard import ShardOptimizer


class ParameterServer:
    """A shard and the clocks of its workers; a thread for each worker may call it."""

    def __init__(
        self, shard: ShardOptimizer, options: ServerOptions, workers: Sequence[int]
    ) -> None:
        self._shard = shard
        self._options = options
        self._changed = threading.Condition()
        self._clocks = dict.fromkeys(workers, 0)  # updates of each worker that is left
        self._num_updates = 0
        self._pushed: dict[int, list[Tensor | None]] = {}
        self._written: Sequence[Tensor] = ()  # what hooks have left of the weights
        self._sent: dict[int, list[Tensor]] = {}
        self._due: dict[int, int] = {}
        self._present: set[int] = set()
        self._num_meetings = 0
        self._is_draining = False
        self._met = Reply([])
        self._is_open = False
        self._failure = ""
        self.arrivals: list[Arrival] = []  # in order, if they are recorded

    def open(self) -> None:
        """Lets pushes in, behind a change of the weights by this rank's hooks."""
        with self._changed:
            if self._options.compensation != "none":
                own = [weight.detach().clone() for weight in self._shard.weights]
                self._sent = dict.fromkeys(self._clocks, own)
            self._is_open = True
            self._changed.notify_all()

    def fail(self, text: str) -> str:
        """Ends all waits; returns why the server has failed first."""
        with self._changed:
            self._failure = self._failure or text
            self._changed.notify_all()
            return self._failure

    def answer(self, worker: int, request: Push | Meet) -> Reply:
        """Does what a worker asks for, when it may.

        Raises:
            RuntimeError: The server has failed.
        """
        with self._changed, torch.no_grad():
            self._written = request.weights or self._written
            if isinstance(request, Meet):
                self._meet(worker, request)
            else:
                self._push(worker, request)
            if isinstance(request, Meet) and not request.drains:
                return self._met
            weights = [weight.detach().clone() for weight in self._shard.weights]
            self._record(Arrival("pull", worker))
            if self._options.compensation != "none":
                self._sent[worker] = weights
            return Reply(weights, dict(self._due))

    def lose(self, worker: int) -> None:
        """Goes on without a worker."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._present.discard(worker)
            self._end_meeting()
            self._changed.notify_all()

    def _push(self, worker: int, push: Push) -> None:
        self._wait(lambda: self._is_open)
        assert self._is_within_bound(worker), f"worker {worker} of {self._clocks} is too far ahead"
        self._clocks[worker] += 1
        self._decide(worker, push.asked)
        self._record(Arrival("push", worker))
        pairs = zip(push.gradients, self._shard.weights, strict=True)
        gradients = [None if g is None else g.to(weight.device) for g, weight in pairs]
        self._pushed[worker] = self._compensated(worker, gradients)
        if self._options.mode != "sync" or len(self._pushed) == len(self._clocks):
            # In the order of ranks, which the result must not depend on.
            pushed = [self._pushed[rank] for rank in sorted(self._pushed)]
            self._pushed.clear()
            self._take_written()
            self._shard.step(_mean(pushed), push.groups)
            self._num_updates += 1
        self._changed.notify_all()
        self._wait(lambda: self._may_go_on(worker))

    def _may_go_on(self, worker: int) -> bool:
        if self._options.mode == "sync":
            return self._clocks[worker] <= self._num_updates
        return self._is_within_bound(worker)

    def _is_within_bound(self, worker: int) -> bool:
        bound = self._options.max_staleness
        return bound is None or self._clocks[worker] - min(self._clocks.values()) <= bound

    def _take_written(self) -> None:
        """Takes the weights of this rank's worker, when no worker still waits for older ones."""
        if self._written:
            for weight, written in zip(self._shard.weights, self._written, strict=True):
                weight.copy_(written)
        self._written = ()

    def _compensated(self, worker: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        if self._options.compensation == "none":
            return gradients
        strength = self._options.compensation_strength
        triples = zip(gradients, self._shard.weights, self._sent[worker], strict=True)
        return [
            None if g is None else g + strength * g * g * (now - sent) for g, now, sent in triples
        ]

    def _decide(self, worker: int, asked: Sequence[int]) -> None:
        """Sets behind which update all workers obey: one that none of them has begun to push."""
        for decision in asked:
            if self._due.get(decision, -1) < self._clocks[worker]:
                self._due[decision] = max(self._clocks.values()) + 1

    def _meet(self, worker: int, meet: Meet) -> None:
        number = self._num_meetings
        self._present.add(worker)
        self._is_draining = meet.drains
        self._end_meeting()
        self._wait(lambda: self._num_meetings > number)

    def _end_meeting(self) -> None:
        if self._present and self._present >= self._clocks.keys():
            self._present.clear()
            # The same for all, though some leave before others.
            self._met = Reply([], dict(self._due), tuple(sorted(self._clocks)))
            if self._is_draining:
                self._take_written()
                self._is_open = False  # before any worker leaves
            self._num_meetings += 1
            self._changed.notify_all()

    def _record(self, arrival: Arrival) -> None:
        if self._options.record_arrivals:
            self.arrivals.append(arrival)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: bool(self._failure) or is_so())
        if self._failure:
            raise RuntimeError(self._failure)


def _mean(pushed: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Returns the means over workers; a worker without a gradient counts as zero."""
    means: list[Tensor | None] = []
    for gradients in zip(*pushed, strict=True):
        present = [gradient for gradient in gradients if gradient is not None]
        means.append(sum(present[1:], present[0]) / len(pushed) if present else None)
    return means

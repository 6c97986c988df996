"""A recorded order of arrivals, replayed in one process, gives the same weights."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import ParameterServerStrategy
from lightning_dist.engine.data_parallel.server.shard import Partition
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

WORKERS, SERVERS, EPOCHS, SAMPLES = 3, 2, 2, 96
STRENGTH = 0.5

Record = list[tuple[str, int]]


class Slow(Classifier):
    """Computes longer on the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.02 if os.environ["RANK"] == str(WORKERS - 1) else 0.001)
        return super().training_step(batch, batch_idx)


def fit(options: dict[str, Any], optimizer: str) -> tuple[dict[str, Tensor], Record]:
    strategy = ParameterServerStrategy(
        num_servers=SERVERS, record_arrivals=True, timeout_s=30.0, **options
    )
    module = make_module(Slow, optimizer=optimizer, schedule_lr=True)
    trainer = make_trainer(devices=WORKERS, strategy=strategy, max_epochs=EPOCHS)
    trainer.fit(module, share_of(int(os.environ["RANK"]), SAMPLES, WORKERS), make_loader(8))
    return state_of(module), [(a.kind, a.worker) for a in strategy.arrivals]


class Replay:
    """Trains as the servers' records say, one event after the other."""

    def __init__(self, records: list[Record], optimizer: str, strength: float) -> None:
        self.module: Classifier = make_module(Classifier)
        self.strength = strength
        self.queues = [deque(record) for record in records]
        parameters = dict(self.module.named_parameters())
        names = {p: name for name, p in parameters.items()}
        partition = Partition(SERVERS)
        partition.extend(make_optimizer(optimizer, parameters.values()))
        self.weights = [{names[p]: p.detach().clone() for p in shard} for shard in partition.shards]
        self.optimizers = [make_optimizer(optimizer, own.values()) for own in self.weights]
        self.first_rate = self.optimizers[0].param_groups[0]["lr"]
        self.batches = {w: list(share_of(w, SAMPLES, WORKERS)) * EPOCHS for w in range(WORKERS)}
        self.num_pushes: Counter[tuple[int, int]] = Counter()
        # What a server has sent to a worker before the worker's next push: the start, first.
        self.pulled = {(s, w): self.copy(s) for s in range(SERVERS) for w in range(WORKERS)}
        self.gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.largest_lead = 0

    def copy(self, server: int) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.weights[server].items()}

    def run(self) -> dict[str, Tensor]:
        while any(self.queues):
            before = sum(map(len, self.queues))
            for server, queue in enumerate(self.queues):
                while queue and self.can_happen(server, *queue[0]):
                    self.happen(server, *queue.popleft())
            assert sum(map(len, self.queues)) < before, "nothing in the records can happen next"
        return {name: value for own in self.weights for name, value in own.items()}

    def can_happen(self, server: int, kind: str, worker: int) -> bool:
        """Whether what a gradient is computed on is known: all servers' last pulls before it."""
        if kind == "pull" or (worker, self.num_pushes[server, worker]) in self.gradients:
            return True
        nexts = [next(k for k, w in queue if w == worker) for queue in self.queues]
        counts = {self.num_pushes[s, worker] for s in range(SERVERS)}
        return set(nexts) == {"push"} and len(counts) == 1

    def happen(self, server: int, kind: str, worker: int) -> None:
        if kind == "pull":
            self.pulled[server, worker] = self.copy(server)
            return
        index = self.num_pushes[server, worker]
        if (worker, index) not in self.gradients:
            self.gradients[worker, index] = self.gradient(worker, index)
        for name, weight in self.weights[server].items():
            g = self.gradients[worker, index][name]
            weight.grad = g + self.strength * g * g * (weight - self.pulled[server, worker][name])
        for group in self.optimizers[server].param_groups:
            group["lr"] = self.first_rate * 0.9**index
        self.optimizers[server].step()
        self.num_pushes[server, worker] += 1
        clocks = [self.num_pushes[server, w] for w in range(WORKERS)]
        self.largest_lead = max(self.largest_lead, clocks[worker] - 1 - min(clocks))

    def gradient(self, worker: int, index: int) -> dict[str, Tensor]:
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for server in range(SERVERS):
                for name, value in self.pulled[server, worker].items():
                    parameters[name].copy_(value)
        x, y = self.batches[worker][index]
        loss = F.cross_entropy(self.module.model(x), y)
        return dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "async": ({"mode": "async"}, "adamw"),
    "bounded": ({"mode": "bounded", "max_staleness": 1}, "sgd"),
    "dc-asgd": (
        {"mode": "async", "compensation": "dc-asgd", "compensation_strength": STRENGTH},
        "sgd",
    ),
}


@pytest.mark.some("bounded")
@pytest.mark.parametrize("name", CASES)
def test_equals_its_record(workers: WorkerPool, name: str) -> None:
    options, optimizer = CASES[name]
    ranks = workers.run(WORKERS, fit, options, optimizer)
    records = [record for _, record in ranks[:SERVERS]]
    oracle = Replay(records, optimizer, STRENGTH if name == "dc-asgd" else 0.0)
    expected = oracle.run()
    for state, _ in ranks:
        for parameter, value in expected.items():
            assert float((state[parameter] - value).abs().max()) < 1e-12, parameter
    # The slow worker is left behind, as far as it may be.
    if name == "bounded":
        assert oracle.largest_lead == 1
    else:
        assert oracle.largest_lead > 1

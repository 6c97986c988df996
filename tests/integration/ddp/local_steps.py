"""Two replicas in one process that step by themselves, and DiLoCo's recursions over them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dist import OuterOptimizer
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.planning.partition import partition_layers
from tests.helpers.networks.models import (
    Classifier,
    make_module,
    make_optimizer,
    share_of,
    state_of,
)

NUM_SAMPLES = 96
NUM_STEPS = NUM_SAMPLES // 2 // 4


class Teacher(Classifier):
    """Has a frozen copy, which follows behind each step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()

    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.model.parameters(), strict=True)
        for own, followed in pairs:
            own.data.lerp_(followed.data, 0.3)


def local_steps(
    num_samples: int, warmup: int, kind: type[Classifier] = Classifier
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the number of each step and the replicas behind it.

    Args:
        num_samples: Of both replicas together.
        warmup: Steps with averaged gradients.
        kind: What is trained.
    """
    modules = [make_module(kind) for _ in range(2)]
    optimizers = [make_optimizer("sgd", m.parameters()) for m in modules]
    shares = [share_of(replica, num_samples) for replica in range(2)]
    for step, batches in enumerate(zip(*shares, strict=True)):
        for module, (x, y) in zip(modules, batches, strict=True):
            module.zero_grad()
            F.cross_entropy(module.model(x), y).backward()
        if step < warmup:
            for same in zip(*(m.parameters() for m in modules), strict=True):
                mean = sum(p.grad for p in same) / 2
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        yield step, modules


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def recursion(sync_every: int, outer: OuterOptimizer, warmup: int) -> dict[str, Tensor]:
    weights = make_module()
    options: dict[str, Any] = {"momentum": outer.momentum, "nesterov": outer.nesterov}
    outer_sgd = torch.optim.SGD(weights.parameters(), lr=outer.lr, **options)
    local = 0
    for step, modules in local_steps(NUM_SAMPLES, warmup):
        if step < warmup:
            weights.load_state_dict(modules[0].state_dict())
            continue
        local += 1
        if local == sync_every or step == NUM_STEPS - 1:
            local = 0
            for parameter, *same in zip(
                weights.parameters(), *(m.parameters() for m in modules), strict=True
            ):
                parameter.grad = parameter.detach() - sum(p.detach() for p in same) / 2
            outer_sgd.step()
            for module in modules:
                module.load_state_dict(weights.state_dict())
    return state_of(weights)


class StreamingOracle:
    """Streaming DiLoCo of two replicas, after algorithm 2 of its paper.

    Args:
        rounds: Of the replicas.
        per_stage: Numbers of parameters on each stage, whose fragments end in turns of their own.

    Attributes:
        weights: The outer weights.
    """

    def __init__(self, rounds: LocalConfig, per_stage: Sequence[int] | None = None) -> None:
        self.rounds = rounds
        self.weights = make_module()
        parameters = list(self.weights.parameters())
        outer = rounds.outer
        assert outer is not None
        options: dict[str, Any] = {"momentum": outer.momentum, "nesterov": outer.nesterov}
        self.optimizer = torch.optim.SGD(parameters, lr=outer.lr, **options)
        self.fragments: list[list[int]] = [[] for _ in range(rounds.fragments)]
        indices = iter(range(len(parameters)))
        for num_own in per_stage or [len(parameters)]:
            own = list(itertools.islice(indices, num_own))
            counts = partition_layers([parameters[i].numel() for i in own], rounds.fragments)
            for fragment, count in zip(self.fragments, counts, strict=True):
                fragment += own[:count]
                del own[:count]
        self.sent: dict[int, tuple[int, list[Tensor]]] = {}

    def mean_gradient(self, index: int, replicas: list[Classifier]) -> Tensor:
        weight, *own = (list(m.parameters())[index].detach() for m in (self.weights, *replicas))
        gradients = [weight - value for value in own]
        if self.rounds.wire == "bf16":
            gradients = [gradient.bfloat16() for gradient in gradients]
        return (sum(gradients, torch.zeros_like(gradients[0])) / len(gradients)).double()

    def send(self, number: int, step: int, replicas: list[Classifier]) -> None:
        gradients = [self.mean_gradient(index, replicas) for index in self.fragments[number]]
        self.sent[number] = step + self.rounds.delay, gradients

    def receive(self, number: int, replicas: list[Classifier], alpha: float) -> None:
        _, gradients = self.sent.pop(number)
        self.optimizer.zero_grad()
        parameters = list(self.weights.parameters())
        for index, gradient in zip(self.fragments[number], gradients, strict=True):
            parameters[index].grad = gradient
        self.optimizer.step()
        for module in replicas:
            own = list(module.parameters())
            for index in self.fragments[number]:
                mixed = alpha * own[index] + (1 - alpha) * parameters[index]
                own[index].data = mixed.detach()

    def train(self) -> dict[str, Tensor]:
        every, alpha = self.rounds.sync_every, self.rounds.alpha
        numbers = range(self.rounds.fragments)
        replicas: list[Classifier] = []
        stepped = set[int]()
        for index, replicas in local_steps(NUM_SAMPLES, 0):
            step = index + 1
            stepped = set(numbers)
            for number in numbers:
                if number in self.sent and self.sent[number][0] == step:
                    self.receive(number, replicas, alpha)
                turn = number * every // self.rounds.fragments
                if step > turn and (step - turn) % every == 0 or step == turn > 0:
                    self.send(number, step, replicas)
                    stepped.discard(number)
                    if self.rounds.delay == 0:
                        self.receive(number, replicas, alpha)
                        stepped |= {number} if alpha else set()
        for number in numbers:
            if number in self.sent:
                self.receive(number, replicas, alpha)
                stepped |= {number} if alpha else set()
            if number in stepped:
                self.send(number, 0, replicas)
                self.receive(number, replicas, 0.0)
        return state_of(self.weights)

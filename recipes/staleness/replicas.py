"""Replicas that step by themselves, and workers of a parameter server, in one process, in turns.

As in :mod:`.lockstep`, replicas' results do not depend on the speed of the ranks. The outer steps
are the package's own. The workers of a server are equally fast, so they push in turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.local_sgd import OuterSteps
from recipes.staleness.lockstep import Loss, Rate


class Replicas:
    """Trains replicas of a model, each on its share of each batch.

    Args:
        model: The whole model; not changed.
        num_replicas: Number of replicas, which divides the samples of a batch.
        local: When the weights are averaged; of its arguments, those of Streaming DiLoCo and the
            warm-up are not simulated.
        make_optimizers: Creates the optimizers of a replica.
        loss: The loss to minimise.
        rate: Returns the learning rate of each update.
        on_update: Called after each update with the number of updates and the mean weights.
    """

    def __init__(
        self,
        model: nn.Sequential,
        num_replicas: int,
        local: LocalConfig,
        make_optimizers: Callable[[nn.Module], list[Optimizer]],
        loss: Loss,
        rate: Rate,
        on_update: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        assert not local.streams
        self._models = [copy.deepcopy(model) for _ in range(num_replicas)]
        self._optimizers = [make_optimizers(replica) for replica in self._models]
        self._local = local
        self._outer = None if local.outer is None else OuterSteps(local.outer)
        self._loss = loss
        self._rate = rate
        self._on_update = on_update
        self._num_updates = 0

    def train_batch(self, batch: Sequence[Tensor]) -> None:
        """Runs one step of each replica, and averages the weights if they are due.

        Args:
            batch: Tensors whose rows are samples.
        """
        if self._outer is not None:
            self._outer.begin(self._models[0].parameters())
        shares = _shares(batch, len(self._models))
        rate = self._rate(self._num_updates)
        for model, optimizers, share in zip(self._models, self._optimizers, shares, strict=True):
            model.zero_grad()
            self._loss(model, share).backward()  # type: ignore[no-untyped-call]
            _step(optimizers, rate)
        self._num_updates += 1
        if self._num_updates % self._local.sync_every == 0:
            self._average()
        names = dict(self._models[0].named_parameters())
        self._on_update(self._num_updates, dict(zip(names, self._means(), strict=True)))

    @torch.no_grad()
    def _means(self) -> list[Tensor]:
        same = zip(*(model.parameters() for model in self._models), strict=True)
        return [torch.stack(tuple(parameters)).mean(0) for parameters in same]

    @torch.no_grad()
    def _average(self) -> None:
        values = self._means()
        if self._outer is not None:
            values = self._outer.step(list(self._models[0].parameters()), values)
        for model in self._models:
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)


class ServedWorkers:
    """Trains with a parameter server that steps on each gradient as it comes.

    Each gradient is of weights that all other workers have pushed to since: its staleness is the
    number of workers, less 1.

    Args:
        model: The whole model; not changed.
        num_workers: Number of workers, which divides the samples of a batch.
        make_optimizers: Creates the optimizers of the server.
        loss: The loss to minimise.
        rate: Returns the learning rate of a batch, whose updates are as many as the workers.
        on_update: Called after each batch with the number of batches and the server's weights.
    """

    def __init__(
        self,
        model: nn.Sequential,
        num_workers: int,
        make_optimizers: Callable[[nn.Module], list[Optimizer]],
        loss: Loss,
        rate: Rate,
        on_update: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        self._server = copy.deepcopy(model)
        self._workers = [copy.deepcopy(model) for _ in range(num_workers)]
        self._optimizers = make_optimizers(self._server)
        self._loss = loss
        self._rate = rate
        self._on_update = on_update
        self._num_batches = 0

    def train_batch(self, batch: Sequence[Tensor]) -> None:
        """Runs one step of each worker: it pushes its gradient, and pulls the newest weights.

        Args:
            batch: Tensors whose rows are samples.
        """
        rate = self._rate(self._num_batches)
        shares = _shares(batch, len(self._workers))
        for worker, share in zip(self._workers, shares, strict=True):
            worker.zero_grad()
            self._loss(worker, share).backward()  # type: ignore[no-untyped-call]
            pairs = zip(self._server.parameters(), worker.parameters(), strict=True)
            for own, pushed in pairs:
                own.grad = pushed.grad
            _step(self._optimizers, rate)
            worker.load_state_dict(self._server.state_dict())
        self._num_batches += 1
        named = self._server.named_parameters()
        self._on_update(self._num_batches, {name: p.detach() for name, p in named})


def _shares(batch: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    return [tuple(tensor[index::count] for tensor in batch) for index in range(count)]


def _step(optimizers: Sequence[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

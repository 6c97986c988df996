"""Replicas that step by themselves, in one process, in turns.

As in :mod:`.lockstep`, the results do not depend on the speed of the ranks. The outer steps are the
package's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.outer_optimizer import OuterSteps
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
        for replica, (model, optimizers) in enumerate(
            zip(self._models, self._optimizers, strict=True)
        ):
            share = tuple(tensor[replica :: len(self._models)] for tensor in batch)
            for optimizer in optimizers:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = self._rate(self._num_updates)
            self._loss(model, share).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
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

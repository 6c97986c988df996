"""All ranks of an asynchronous pipeline in one process, in turns.

The results of an asynchronous pipeline do not depend on the speed of its ranks, so ranks need not
run at the same time. Here each rank runs its round of a batch in turn, and passes messages in
memory. That works if a rank's round needs only the activations of the rank before, and the rank
behind's messages of earlier rounds. It does under ``pipedream``, and under ``pipedream_2bw`` with
two stages and one micro-batch. Stages, weight versions and corrections are the package's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.config import PipelineConfig

Loss = Callable[[nn.Module, Any], Tensor]
"""Takes the model and a batch."""
Rate = Callable[[int], float]
"""Takes an update; returns its learning rate."""


class Lockstep:
    """Trains a model as a pipeline would.

    Args:
        model: The whole model; not changed.
        config: The arguments of the pipeline.
        layers_per_stage: The partition.
        make_optimizers: Creates the optimizers of a stage's layers.
        loss: The loss to minimise.
        rate: Returns the learning rate of each update, before a correction.
        on_update: Called after each update with the number of updates and the stage's weights.
    """

    def __init__(
        self,
        model: nn.Sequential,
        config: PipelineConfig,
        layers_per_stage: Sequence[int],
        make_optimizers: Callable[[nn.Module], list[Optimizer]],
        loss: Loss,
        rate: Rate,
        on_update: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        links = connect_in_memory(range(len(layers_per_stage)))
        self._ranks = [
            _Rank(
                copy.deepcopy(model),
                config,
                PipelineShape(config.schedule, 1, tuple(layers_per_stage), rank),
                ends,
                make_optimizers,
                loss,
                rate,
                on_update,
            )
            for rank, ends in enumerate(links)
        ]

    def train_batch(self, batch: Any) -> None:
        """Runs one round on each rank, with the updates that come due.

        Args:
            batch: Any tree of tensors.
        """
        for rank in self._ranks:
            rank.train_batch(batch)

    def drain(self) -> None:
        """Finishes the batches in flight."""
        for rank in reversed(self._ranks):
            rank.drain()

    @property
    def staleness(self) -> list[tuple[int, ...]]:
        """The staleness of each update, by stage."""
        return [rank.pipeline.stages.staleness[place] for place, rank in enumerate(self._ranks)]


class _Rank:
    """One rank, with the training loop around it."""

    def __init__(
        self,
        model: nn.Sequential,
        config: PipelineConfig,
        shape: PipelineShape,
        links: Links,
        make_optimizers: Callable[[nn.Module], list[Optimizer]],
        loss: Loss,
        rate: Rate,
        on_update: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        self._model = model
        self._loss = loss
        self._rate = rate
        self._on_update = on_update
        self._correction = config.rate_correction(shape)
        first = sum(shape.layers_per_stage[: shape.rank])
        own = model[first : first + shape.layers_per_stage[shape.rank]]
        self._optimizers = make_optimizers(own)
        predict = config.prediction(self._optimizers[0])
        self.pipeline = Pipeline(
            model,
            shape,
            links,
            StageOptions(weight_versions=config.weight_versions, predict=predict),
        )

    def train_batch(self, batch: Any) -> None:
        pipeline = self.pipeline  # forwards that foresee updates do so at the next one's rate
        in_flight = min(pipeline.delay, pipeline.batches_since_drain)
        self._set_rate(self._rate(pipeline.num_batches - in_flight))
        self.pipeline.train_batch(batch, self._step)
        if self.pipeline.has_gradients:
            self._update()

    def drain(self) -> None:
        for _ in self.pipeline.drain():
            self._update()

    def _step(self, microbatch: Microbatch) -> Tensor:
        return self._loss(self._model, microbatch.content)

    def _update(self) -> None:
        update = self.pipeline.gradients_of_batch
        factor = 1.0 if self._correction is None else self._correction.factor(update)
        self._set_rate(self._rate(update) * factor)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.pipeline.install_gradients()
        with self.pipeline.updating():
            for optimizer in self._optimizers:
                optimizer.step()
        own = self.pipeline.stages.named_parameters().items()
        self._on_update(update + 1, {name: p.detach() for name, p in own})

    def _set_rate(self, rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

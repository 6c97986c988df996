"""How fast a run trains: what RunSummary prints and a study maximizes."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from torch import Tensor
from typing_extensions import override


class Throughput(L.Callback):
    """Counts the elements of a batch's first tensor, such as tokens, and the time of training.

    The clock runs from the first counted batch to the next validation or the end, so that the time
    between batches counts: fetching data, and a pipeline's draining.

    Args:
        skipped_batches: Batches at the beginning that do not count.
    """

    def __init__(self, skipped_batches: int = 0) -> None:
        self._skipped = skipped_batches
        self._training_seconds = 0.0
        self._tokens = 0
        self._batches = 0
        self._clock_start: float | None = None

    def tokens_per_second(self, trainer: L.Trainer) -> float | None:
        """Returns the rate of all data replicas together, or None if nothing was counted.

        Args:
            trainer: The trainer of the run.
        """
        if not self._training_seconds:
            return None
        replicas = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        return self._tokens * int(replicas["num_replicas"]) / self._training_seconds

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._training_seconds, self._tokens, self._batches = 0.0, 0, 0
        self._clock_start = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._clock_start is None and self._batches > self._skipped:
            self._clock_start = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        if self._clock_start is not None:
            self._tokens += batch[0].numel()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_clock()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_clock()

    def _stop_clock(self) -> None:
        if self._clock_start is not None:
            self._training_seconds += time.perf_counter() - self._clock_start
            self._clock_start = None

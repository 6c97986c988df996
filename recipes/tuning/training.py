"""The training of a trial: a process of its own on each rank, so that it may fail alone.

The processes are forked from one that has imported what they need. They meet at a store of the
trial's own, as torchrun's processes meet at torchrun's.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import lightning as L
from typing_extensions import override

from recipes.command_line import run
from recipes.throughput import Throughput
from recipes.tuning.definition import TOKENS_PER_SECOND
from recipes.tuning.outcome import Order, Outcome, Report


def train(
    connection: Connection,
    order: Order,
    objectives: tuple[str, ...],
    skipped_batches: int,
    environment: Mapping[str, str],
) -> None:
    """Trains one trial on this rank, and sends its outcome.

    Args:
        connection: To the rank's own process.
        order: The trial.
        objectives: Names of the objectives.
        skipped_batches: Batches whose time does not count.
        environment: Environment of a rank.
    """
    threading.Thread(target=_end_with_the_rank, daemon=True).start()
    os.environ.update(environment)
    _write_to(Path(order.folder) / f"rank_{environment.get('RANK', '0')}.log")
    sys.argv = ["recipes.train", "fit", *order.words]
    progress = Progress(connection, objectives, skipped_batches)
    try:
        run(callbacks=[progress])
        connection.send(progress.outcome)
    except BaseException as error:
        traceback.print_exc()
        connection.send(Outcome("failed", error=f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(1)  # without its thread pools, which may wait for other ranks


class Progress(Throughput):
    """Reports a single objective at each validation, and stops all ranks if the trial is pruned.

    Args:
        connection: To the rank's own process.
        objectives: Names of the objectives.
        skipped_batches: Batches whose time does not count.
    """

    def __init__(
        self, connection: Connection, objectives: tuple[str, ...], skipped_batches: int
    ) -> None:
        super().__init__(skipped_batches)
        self._connection = connection
        self._objectives = objectives
        self._num_validations = 0
        self.outcome = Outcome("failed", error="The training ended ahead of its end.")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or len(self._objectives) > 1:
            return
        is_pruned = False
        if trainer.is_global_zero:  # whose process asks the study
            value = self._value(self._objectives[0], trainer)
            self._connection.send(Report(value, self._num_validations))
            is_pruned = self._connection.recv()
        self._num_validations += 1
        if trainer.strategy.broadcast(is_pruned):
            trainer.should_stop = True
            self.outcome = Outcome("pruned", epochs=trainer.current_epoch + 1)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.outcome.state == "pruned":
            return
        values = {name: self._value(name, trainer) for name in self._objectives}
        self.outcome = Outcome("complete", values, trainer.current_epoch)

    def _value(self, name: str, trainer: L.Trainer) -> float:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rate = self.tokens_per_second(trainer)
        if rate is not None:
            metrics[TOKENS_PER_SECOND] = rate
        if name not in metrics:
            raise ValueError(
                f"The objective {name!r} was not logged. There are: {', '.join(sorted(metrics))}."
            )
        if not math.isfinite(metrics[name]):
            raise ValueError(f"The objective {name!r} is {metrics[name]}.")
        return metrics[name]


def _write_to(path: Path) -> None:
    """Lets this process print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with_the_rank() -> None:
    """Ends a training that may be in the middle of a collective when its rank is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

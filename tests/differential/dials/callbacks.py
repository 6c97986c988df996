"""The callbacks that a case may name."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.callbacks import ShardedWeightAveraging
from tests.differential.dials.models import FEATURES, OF_TOKENS, TOKENS, logits_of
from tests.differential.dials.strategies import STRATEGIES

STOPPING_STEP = 3
OWN = "own"
"""A metric that differs by rank."""


class StopAtNaN(L.Callback):
    """Ends training when a batch's loss is not a number."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if math.isnan(float(args[1]["loss"])):
            trainer.should_stop = True


class StopAtStep(L.Callback):
    """Ends training on all ranks, as a user's callback may."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= STOPPING_STEP:
            trainer.should_stop = True


class SaveAtStep(L.Callback):
    """Saves the run once while it goes on, or when it ends before that.

    Args:
        step: When.
        path: Where to.
    """

    def __init__(self, step: int, path: str) -> None:
        self._step = step
        self._path = path
        self._has_saved = False

    def _save(self, trainer: L.Trainer) -> None:
        if not self._has_saved:
            trainer.save_checkpoint(self._path)
            self._has_saved = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self._step:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer)


class StopFirstRank(L.Callback):
    """Ends training on the first rank alone, as a look at the clock may.

    What only some ranks ask for happens some batches later, or where all ranks meet before: behind
    a validation, and at the end of an epoch. So one device waits as long.
    """

    def __init__(self) -> None:
        self._batches: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._batches = None  # before the sanity check, which is a validation, too

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        is_due = trainer.global_step >= STOPPING_STEP
        if trainer.world_size > 1:
            if trainer.global_rank == 0 and is_due:
                trainer.should_stop = True
            return
        if self._batches is not None:
            self._batches += 1
        elif is_due:
            self._batches = 0
        if self._batches == STRATEGIES[module.case.strategy].batches_to_stop:  # type: ignore[union-attr]
            trainer.should_stop = True

    def _meet(self, trainer: L.Trainer) -> None:
        if trainer.world_size == 1 and self._batches is not None:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._meet(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._meet(trainer)


class RaiseAtStep(L.Callback):
    """Ends the run with an error on all ranks."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= STOPPING_STEP:
            raise ValueError("This callback raises on all ranks.")


class NameByRank(L.Callback):
    """Gives each rank a value of its own, for a checkpoint's file name."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        trainer.callback_metrics[OWN] = torch.tensor(0.25 * (1 + trainer.global_rank))


class DrawNumbers(L.Callback):
    """Draws a number on the first rank, as what only that one does may."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            torch.rand(())


class RateByHand(L.Callback):
    """Changes the learning rate now and then, without a scheduler."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 2 == 1:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = group["lr"] * 0.8


class UnfreezeLater(L.Callback):
    """Freezes the third layer in the first epoch only."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for parameter in module.model[2].parameters():  # type: ignore[index, union-attr]
            parameter.requires_grad_(trainer.current_epoch > 0)


class CountUpdates(L.Callback):
    """Counts updates, and remembers that in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        self.count += 1

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.callback_metrics["updates"] = torch.tensor(float(self.count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class LogInHooks(L.Callback):
    """Logs in the hooks of batches and epochs, as a user's callback may."""

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        module.log("begun", float(batch_idx))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.log("steps", float(trainer.global_step), on_step=True, on_epoch=True, batch_size=2)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log_dict({"epoch_of_validation": float(trainer.current_epoch)}, sync_dist=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.log("epoch_of_training", float(trainer.current_epoch))


class CallModel(L.Callback):
    """Calls the model in hooks of validations and at the end, as one does that draws samples."""

    def _sampled(self, module: Any) -> Tensor:
        example = torch.linspace(-1.0, 1.0, 4 * FEATURES).view(4, FEATURES)
        if module.case.model in OF_TOKENS:
            example = torch.arange(12).view(4, 3) % TOKENS
        else:
            example = example.to(next(module.model.parameters(), example).dtype)
        with torch.no_grad():
            return logits_of(module.model(example.to(module.device))).double().mean()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("sampled", self._sampled(module))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.callback_metrics["sampled_at_end"] = self._sampled(module)


class ClampWeights(L.Callback):
    """Keeps weights within bounds behind each batch, as a Wasserstein critic's are."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.2, 0.2)


class FinetuneSecondPart(BackboneFinetuning):
    """Trains the last layers, then all."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.1)


Make = Callable[[str], L.Callback]
"""Builds a callback that writes into a folder."""

CALLBACKS: dict[str, Make] = {
    "best": lambda folder: ModelCheckpoint(
        folder,
        "best-{epoch}-{step}-{val_loss:.3f}",
        monitor="val_loss",
        save_top_k=2,
        save_last=True,
    ),
    "every_steps": lambda folder: ModelCheckpoint(
        folder, "every-{step}", every_n_train_steps=2, save_top_k=-1
    ),
    "weights": lambda folder: ModelCheckpoint(
        folder, "weights-{epoch}", save_weights_only=True, save_top_k=-1, every_n_epochs=1
    ),
    "train_best": lambda folder: ModelCheckpoint(
        folder,
        "train-{step}",
        monitor="train_loss_epoch",
        mode="max",
        save_on_train_epoch_end=True,
    ),
    "own_names": lambda folder: ModelCheckpoint(
        folder, "own-{step}-{own:.2f}", every_n_train_steps=2, save_top_k=1
    ),
    "linked_last": lambda folder: ModelCheckpoint(
        folder, "linked-{step}", every_n_train_steps=3, save_last="link"
    ),
    "on_exception": lambda folder: ModelCheckpoint(
        folder, "exception-{step}", every_n_train_steps=100, save_on_exception=True
    ),
    "raises": lambda _: RaiseAtStep(),
    "early": lambda _: EarlyStopping("val_loss", patience=0, min_delta=1.0),
    "early_train": lambda _: EarlyStopping(
        "train_loss_epoch", patience=0, min_delta=1.0, check_on_train_epoch_end=True
    ),
    "stop_at_nan": lambda _: StopAtNaN(),
    "stop": lambda _: StopAtStep(),
    "stop_first_rank": lambda _: StopFirstRank(),
    "rates": lambda _: LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
    "rates_by_epoch": lambda _: LearningRateMonitor("epoch"),
    "rate_by_hand": lambda _: RateByHand(),
    "draws": lambda _: DrawNumbers(),
    "finetune": lambda _: FinetuneSecondPart(),
    "unfreeze": lambda _: UnfreezeLater(),
    "average": lambda _: ShardedWeightAveraging(decay=0.5),
    "ema": lambda _: EMAWeightAveraging(decay=0.5),
    "logs": lambda _: LogInHooks(),
    "swa": lambda _: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1),
    "timer": lambda _: Timer(timedelta(days=1)),
    "accumulate_later": lambda _: GradientAccumulationScheduler({1: 2}),
    "count": lambda _: CountUpdates(),
    "samples": lambda _: CallModel(),
    "clamp_weights": lambda _: ClampWeights(),
}
WRITING = (
    "best",
    "every_steps",
    "weights",
    "train_best",
    "own_names",
    "linked_last",
    "on_exception",
)


def make_callbacks(names: tuple[str, ...], folder: str) -> list[L.Callback]:
    """Builds the callbacks of a case in its order."""
    made = [CALLBACKS[name](folder) for name in names]
    return [NameByRank(), *made] if "own_names" in names else made

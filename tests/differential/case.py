"""One training run as plain values.

Dimensions are left out where one device itself is no referee. Dropout draws other numbers when a
batch is cut. Running statistics see micro-batches and shares, so a norm over the batch comes with
one micro-batch and without replicas. Averages of weights are taken between batches, where stages of
an asynchronous pipeline have made different numbers of updates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Clip = tuple[Literal["norm", "value"], float]


@dataclass(frozen=True)
class Case:
    """A run that a strategy must not change.

    Attributes:
        strategy: Key of ``strategies.STRATEGIES``.
        model: Key of ``models.MODELS``.
        optimizer: Key of ``optimizers.OPTIMIZERS``.
        scheduler: Key of ``optimizers.SCHEDULERS``.
        precision: ``"double"`` is a float64 module under Lightning's default.
        accumulate: Batches for each update.
        clip: Algorithm and value of gradient clipping.
        callbacks: Keys of ``callbacks.CALLBACKS``.
        logs: Keys of ``logs.LOGS``.
        parameter_hooks: Keys of ``models.PARAMETER_HOOKS``.
        returns: What ``training_step`` returns.
        data: Key of ``data.LOADERS``.
        batch_size: Samples of a global batch.
        num_batches: Global batches of an epoch.
        last_batch: Samples of an epoch's last global batch.
        epochs: Number of epochs.
        val_check_interval: Batches from one validation to the next; None validates at epoch ends.
        limit_train_batches: Global batches of an epoch that are used; None uses all.
        limit_val_batches: Validation batches; 0 leaves validation out.
        log_every_n_steps: As for ``Trainer``.
        resume_at: Steps after which the run is saved, ended, and resumed by another.
        lr_find: Whether the learning rate finder runs before.
        hooks: Whether the module overrides each of Lightning's hooks.
    """

    strategy: str = "1f1b"
    model: str = "mlp"
    optimizer: str = "sgd"
    scheduler: str | None = None
    precision: Literal["double", "64-true", "32-true"] = "double"
    accumulate: int = 1
    clip: Clip | None = None
    callbacks: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    parameter_hooks: tuple[str, ...] = ()
    returns: Literal["loss", "dict"] = "loss"
    data: str = "ordered"
    batch_size: int = 8
    num_batches: int = 4
    last_batch: int = 8
    epochs: int = 1
    val_check_interval: int | None = None
    limit_train_batches: int | None = None
    limit_val_batches: int = 1
    log_every_n_steps: int = 1
    resume_at: int | None = None
    lr_find: bool = False
    hooks: bool = False

    def __repr__(self) -> str:
        """Shows what is not the default, as a call that makes an equal case."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(shown)})"

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.batch_size * (self.num_batches - 1) + self.last_batch

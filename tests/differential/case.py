"""One training run as plain values.

Dimensions are left out where one device itself is no referee. Dropout draws other numbers when a
batch is cut. Running statistics see micro-batches and shares, so a norm over the batch comes with
one micro-batch and without replicas. Averages of weights are taken between batches, where stages of
an asynchronous pipeline have made different numbers of updates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

ROUGH_PRECISIONS = ("bf16-mixed", "half")
"""Precisions in which a share of a batch is rounded otherwise than the batch."""

Clip = tuple[Literal["norm", "value", "by_hand"], float]


@dataclass(frozen=True)
class Case:
    """A run that a strategy must not change.

    Attributes:
        strategy: Key of ``dials.strategies.STRATEGIES``.
        model: Key of ``dials.models.MODELS``.
        built_late: Whether ``configure_model`` builds it.
        saves_part: Whether the module leaves its first layer out of checkpoints.
        optimizer: Key of ``dials.optimizers.OPTIMIZERS``.
        scheduler: Key of ``dials.optimizers.SCHEDULERS``.
        precision: ``"double"`` is a float64 module under Lightning's default, ``"half"`` one under
            ``MixedPrecision``; others are Lightning's.
        accumulate: Batches for each update.
        clip: Algorithm and value of gradient clipping; by hand the module does it, by value.
        callbacks: Keys of ``dials.callbacks.CALLBACKS``.
        logs: Keys of ``dials.module.LOGS``.
        parameter_hooks: Keys of ``dials.models.PARAMETER_HOOKS``.
        layer_hooks: Keys of ``dials.layer_hooks.LAYER_HOOKS``.
        keeps: Keys of ``dials.module.KEEPS``.
        loss_depends_on: What ``training_step`` multiplies its loss by a function of.
        returns: What ``training_step`` returns; with a weight its loss is a weighted mean.
        stepping: Who steps optimizers: Lightning, an ``optimizer_step`` that warms the rate up, or
            the training step, with one or two of them.
        data: Key of ``dials.data.LOADERS``.
        data_module: Whether a ``LightningDataModule`` has the loaders.
        batch_size: Samples of a global batch.
        num_batches: Global batches of an epoch.
        last_batch: Samples of an epoch's last global batch.
        epochs: Number of epochs.
        val_check_interval: Batches from one validation to the next; None validates at epoch ends.
        limit_train_batches: Global batches of an epoch that are used; None uses all.
        limit_val_batches: Validation batches; 0 leaves validation out.
        log_every_n_steps: As for ``Trainer``.
        sanity_steps: Validation batches ahead of training.
        val_loaders: Number of validation loaders.
        val_outputs: Whether validation keeps outputs, for a value at its end.
        options: Keys of ``run.TRAINER_OPTIONS``.
        fits: How often the module is fitted: once, again by the trainer for as many epochs more,
            or anew by another trainer.
        validates_first: Whether the trainer validates before it fits.
        check_val_every_n_epoch: As for ``Trainer``.
        reload_every_n_epochs: ``reload_dataloaders_every_n_epochs`` of ``Trainer``.
        max_steps: As for ``Trainer``; None sets no limit.
        resume_at: Steps after which the run is saved, ended, and resumed by another.
        goes_on: Whether the run that is resumed goes on after it is saved, instead of ending.
        begun_by_one_device: Whether the run that is resumed is one device's.
        evaluates: Whether the module is tested behind the fit, and predicts.
        lr_find: Whether the learning rate finder runs before.
        hooks: Whether the module overrides each of Lightning's hooks.
    """

    strategy: str = "1f1b"
    model: str = "mlp"
    built_late: bool = False
    saves_part: bool = False
    optimizer: str = "sgd"
    scheduler: str | None = None
    precision: Literal["double", "64-true", "32-true", "bf16-mixed", "half"] = "double"
    accumulate: int = 1
    clip: Clip | None = None
    callbacks: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    parameter_hooks: tuple[str, ...] = ()
    layer_hooks: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    loss_depends_on: Literal["global_step", "epoch", "batch_idx"] | None = None
    returns: Literal["loss", "dict", "weight"] = "loss"
    stepping: Literal["automatic", "own_step", "manual", "two_manual"] = "automatic"
    data: str = "ordered"
    data_module: bool = False
    batch_size: int = 8
    num_batches: int = 4
    last_batch: int = 8
    epochs: int = 1
    val_check_interval: int | None = None
    limit_train_batches: int | None = None
    limit_val_batches: int = 1
    log_every_n_steps: int = 1
    sanity_steps: int = 0
    val_loaders: int = 1
    val_outputs: bool = False
    options: tuple[str, ...] = ()
    fits: Literal["once", "again", "anew"] = "once"
    validates_first: bool = False
    check_val_every_n_epoch: int | None = 1
    reload_every_n_epochs: int = 0
    max_steps: int | None = None
    resume_at: int | None = None
    goes_on: bool = False
    begun_by_one_device: bool = False
    evaluates: bool = False
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
    def is_manual(self) -> bool:
        """Whether the training step steps the optimizers."""
        return self.stepping in ("manual", "two_manual")

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.batch_size * (self.num_batches - 1) + self.last_batch

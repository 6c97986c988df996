"""Go on inside of an epoch, on as many replicas as there are.

An ordinary loader begins its epoch anew when a run is resumed, and the samples of a step depend on
the number of replicas. Here the samples are put in one order for all replicas, drawn from the seed
and the epoch. Step ``n`` of an epoch takes the ``n``-th part of that order, whatever the number of
replicas, which accumulate more micro-batches if they are fewer. So the place in an epoch is a
number of samples, and a checkpoint keeps it as the loader's state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from math import gcd
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import check_count
from lightning_dist.strategies.base import lightning_internals, lightning_loaders
from lightning_dist.strategies.base.rank_view import Viewable, view_of

_KEY = "lightning_dist.elastic"  # in a checkpoint


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the data: an epoch, and the samples of it that all replicas have trained on."""

    epoch: int = 0
    samples: int = 0


class StepSampler(DistributedSampler[int]):
    """Yields a replica's samples of an epoch, by steps that are the same for any number of them.

    Args:
        dataset: The data set; the samples at an epoch's end that fill no step are left out.
        batch_size: Samples of a replica in a micro-batch.
        num_microbatches: Micro-batches of a replica in a step.
        num_replicas: Number of data replicas.
        rank: Index of this replica.
        shuffle: Whether each epoch has another order, drawn from the seed and the epoch.
        begun: The place where an epoch begins, if not at its first sample.

    Raises:
        ValueError: The data set has fewer samples than a step takes.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_microbatches: int,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool,
        begun: Place,
    ) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # as Lightning's own sampler
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        num_samples = len(dataset)
        self._batch_size = batch_size
        of_step = batch_size * num_microbatches * num_replicas
        self.total_size = num_samples - num_samples % of_step
        self.num_samples = self.total_size // num_replicas
        if not self.total_size:
            raise ValueError(
                f"The data set has {num_samples} samples, and a step takes {of_step}:"
                f" batch_size={batch_size} x {num_microbatches} micro-batches x {num_replicas}"
                " replicas. Use smaller batches, or accumulate fewer."
            )
        self._begun = Place(begun.epoch, begun.samples - begun.samples % of_step)

    @override
    def __iter__(self) -> Iterator[int]:
        done = self._begun.samples if self._begun.epoch == self.epoch else 0
        return islice(super().__iter__(), done // self.num_replicas, None)

    @property
    def samples_of_batch(self) -> int:
        """Samples of all replicas in a micro-batch."""
        return self._batch_size * self.num_replicas

    @property
    def samples_begun(self) -> int:
        """Samples of all replicas before the place where an epoch begins, in whole steps."""
        return self._begun.samples


class Elastic(pl.Callback):
    """Resumes a run inside of an epoch, with the same steps on another number of replicas.

    No sample is repeated or left out, but for those that fill no step at the end of an epoch, as
    with ``drop_last``. With as many replicas the run equals an uninterrupted one. With fewer or
    more, sums are in another order, and dropout draws other numbers.

    The training loader must be one ``DataLoader`` of a data set with a length, with a
    ``batch_size``, in order or shuffled. The batch size is that of a replica.

    Args:
        replicas: Number of data replicas that the Trainer's ``accumulate_grad_batches`` is meant
            for. Fewer replicas accumulate more micro-batches, so that a step has as many samples.
            None keeps the Trainer's number; then a step of fewer replicas has fewer samples.

    Raises:
        ValueError: ``replicas`` is not a positive number.
    """

    def __init__(self, replicas: int | None = None) -> None:
        if replicas is not None:
            check_count("replicas", replicas, instead="None")
        self._replicas = replicas
        self._own_number = 1  # of micro-batches in a step, as the Trainer was given it
        self._loaded: Place | None = None
        self._sampler: StepSampler | None = None
        self._undo = ExitStack()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._undo.close()  # of a run that has failed
        mesh, own = _mesh_of(trainer), trainer.accumulate_grad_batches
        self._own_number = own
        trainer.accumulate_grad_batches = self.micro_batches_of(own, mesh.data_size)
        self._undo.callback(setattr, trainer, "accumulate_grad_batches", own)

        def wrap(hook: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: self._resumable(hook(), trainer, mesh)

        undo = lightning_loaders.replace_loader_hooks(trainer, wrap, only_training=True)
        self._undo.callback(undo)

    def micro_batches_of(self, own: int, data_size: int) -> int:
        """Returns the micro-batches of a step on each of some replicas.

        Raises:
            ValueError: The replicas cannot share out a step evenly.
        """
        num_microbatches = own * (self._replicas or data_size)
        accumulate, rest = divmod(num_microbatches, data_size)
        if rest:
            raise ValueError(
                f"Elastic(replicas={self._replicas}) and accumulate_grad_batches={own}: the"
                f" {num_microbatches} micro-batches of a step cannot be shared out evenly among"
                f" {data_size} replicas. Use a product that each possible number of replicas"
                " divides, or replicas=None."
            )
        return accumulate

    def _resumable(self, loader: Any, trainer: pl.Trainer, mesh: MeshShape) -> Any:
        _check_loader(loader)
        sampler = StepSampler(
            loader.dataset,
            loader.batch_size,
            trainer.accumulate_grad_batches,
            num_replicas=mesh.data_size,
            rank=mesh.data_index(trainer.global_rank),
            shuffle=not _is_in_order(loader.sampler),
            begun=self._loaded or Place(),
        )
        self._sampler = sampler
        resumable = lightning_loaders.copy_of_loader(loader, "sampler", sampler)
        resumable.__dict__.update(
            batch_sampler=BatchSampler(sampler, loader.batch_size, drop_last=True),
            # For Lightning, which warns where a loader has no state. All of it is in `Place`.
            state_dict=dict,
            load_state_dict=lambda _: None,
        )
        return resumable

    # --- the place ---------------------------------------------------------------------------

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._sampler is None:
            return  # the run has not begun
        epoch, num_batches, _ = lightning_internals.batches_done(trainer)
        # The gradients of a step that is under way are in no checkpoint.
        num_batches -= num_batches % trainer.accumulate_grad_batches
        place = Place(epoch, num_batches * self._sampler.samples_of_batch)
        checkpoint[_KEY] = asdict(place)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if _KEY in checkpoint:
            self._loaded = Place(**checkpoint[_KEY])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":  # Lightning counts its frequency in micro-batches
                steps = steps_between(config.frequency, self._own_number)
                config.frequency = steps * trainer.accumulate_grad_batches
        place, self._loaded = self._loaded, None
        if place is None or self._sampler is None:
            return
        *_, has_ended = lightning_internals.batches_done(trainer)
        num_batches = self._sampler.samples_begun // self._sampler.samples_of_batch
        if has_ended:
            num_batches = int(trainer.num_training_batches)
        lightning_internals.set_batches_done(trainer, num_batches)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo.close()
        self._loaded = self._sampler = None


def steps_between(frequency: int, num_microbatches: int) -> int:
    """Returns after how many steps of some micro-batches a number of these is divided again."""
    return frequency // gcd(frequency, num_microbatches)


def _mesh_of(trainer: pl.Trainer) -> MeshShape:
    if not isinstance(trainer.strategy, Viewable) and trainer.world_size > 1:
        raise ValueError(
            f"Elastic cannot see which ranks of {type(trainer.strategy).__name__} are replicas. Use"
            " a strategy of lightning_dist."
        )
    return view_of(trainer).mesh


def _check_loader(loader: Any) -> None:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"Elastic takes one torch DataLoader of a data set with a length, not {kind} over"
            f" {type(getattr(loader, 'dataset', None)).__name__}. Leave Elastic out, and give the"
            " loader a `state_dict` and a `load_state_dict`: they resume on as many replicas."
        )
    sampler = type(loader.sampler).__name__
    if loader.batch_size is None or not isinstance(
        loader.sampler, (SequentialSampler, RandomSampler, DistributedSampler)
    ):
        raise ValueError(
            f"Elastic draws the samples itself, in place of the loader's {sampler} with"
            f" batch_size={loader.batch_size}. Give the DataLoader a `batch_size` and `shuffle`, no"
            " sampler of your own."
        )


def _is_in_order(sampler: object) -> bool:
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return isinstance(sampler, SequentialSampler)

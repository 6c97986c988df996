"""The samples of a step are the same for any number of replicas."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

from lightning_dist.callbacks.elastic import Elastic, Place, StepSampler

BATCH_SIZE, STEP = 2, 8  # samples of a replica in a micro-batch, of all in a step


def sampler_of(rank: int, replicas: int, begun: Place, *, shuffle: bool = True) -> StepSampler:
    return StepSampler(
        range(37),
        BATCH_SIZE,
        STEP // BATCH_SIZE // replicas,
        num_replicas=replicas,
        rank=rank,
        shuffle=shuffle,
        begun=begun,
    )


def steps_of(
    replicas: int, epoch: int = 0, begun: Place | None = None, **how: bool
) -> list[set[int]]:
    """Lists the samples of each step of an epoch."""
    samplers = [sampler_of(rank, replicas, begun or Place(), **how) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    micro_batches = [
        iter(BatchSampler(sampler, BATCH_SIZE, drop_last=True)) for sampler in samplers
    ]
    steps: list[set[int]] = []
    while True:
        own = [batch for part in micro_batches for batch in islice(part, STEP // 2 // replicas)]
        if not own:
            return steps
        step = {index for batch in own for index in batch}
        assert len(step) == STEP
        steps.append(step)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_steps_of_an_epoch_are_those_of_one_replica(replicas: int, epoch: int) -> None:
    steps = steps_of(replicas, epoch)
    assert steps == steps_of(1, epoch)
    assert len(steps) == 37 // STEP
    assert len(set().union(*steps)) == STEP * len(steps)


def test_epochs_are_shuffled_unless_the_loader_is_in_order() -> None:
    assert steps_of(2, 0) != steps_of(2, 1)
    in_order = [set(range(first, first + STEP)) for first in range(0, 32, STEP)]
    assert steps_of(2, 1, shuffle=False) == in_order


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("samples", [0, 16, 21, 32])
def test_an_epoch_begins_behind_its_whole_steps(replicas: int, samples: int) -> None:
    begun = Place(3, samples)
    assert steps_of(replicas, 3, begun) == steps_of(1, 3)[samples // STEP :]
    assert steps_of(replicas, 4, begun) == steps_of(1, 4)
    assert sampler_of(0, replicas, begun).samples_begun == samples // STEP * STEP


def test_too_few_samples_for_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="7 samples, and a step takes 8: batch_size=2 x 2"):
        StepSampler(range(7), 2, 2, num_replicas=2, rank=0, shuffle=True, begun=Place())


class Regression(L.LightningModule):
    """Notes the samples that it is trained on."""

    def __init__(self, frequency: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.frequency = frequency
        self.seen: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen += batch[0].tolist()
        return ((self.weight * batch[0] - 1) ** 2).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates += [group["lr"] for group in optimizer.param_groups]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Raises(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            raise KeyError("the end of an attempt")


def fit(
    folder: Path, *callbacks: L.Callback, loader: Any = None, frequency: int = 1, **options: Any
) -> Regression:
    """Trains from the last checkpoint on."""
    module = Regression(frequency)
    save = ModelCheckpoint(folder, save_last=True, save_on_exception=True)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, save],
        **{"max_epochs": 2, "accumulate_grad_batches": 2, **options},
    )
    samples = TensorDataset(torch.linspace(0, 1, 17, dtype=torch.float64))
    path = "last" if folder.exists() else None
    trainer.fit(module, loader or DataLoader(samples, 2, shuffle=True), ckpt_path=path)
    return module


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval")
def test_a_run_goes_on_with_the_step_that_it_was_in(tmp_path: Path) -> None:
    """Batch 6 is the first of two that make a step; batch 9, in the next epoch, the second."""
    whole = fit(tmp_path / "whole", Elastic())
    assert len(whole.seen) == 2 * 16
    for batch in (6, 9):
        with pytest.raises(KeyError):
            fit(tmp_path / "found", Elastic(), Raises(batch))
        saved = torch.load(tmp_path / "found" / "last.ckpt", weights_only=True)
        assert saved["lightning_dist.elastic"]["samples"] % 4 == 0  # gradients are not saved
    last = fit(tmp_path / "found", Elastic())
    assert last.seen == whole.seen[2 * 10 :]
    assert torch.equal(last.weight, whole.weight)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval")
@pytest.mark.parametrize(
    ("own", "frequency", "steps"), [(1, 2, 2), (2, 2, 1), (2, 3, 3), (2, 4, 2)]
)
def test_a_scheduler_steps_behind_the_same_steps(
    tmp_path: Path, own: int, frequency: int, steps: int
) -> None:
    """This replica is one of two that the numbers are meant for, and Lightning's alone."""
    options = {"frequency": frequency, "max_epochs": 1}
    alone = fit(tmp_path / "alone", Elastic(), accumulate_grad_batches=own, **options).rates
    one = fit(tmp_path / "one", Elastic(replicas=2), accumulate_grad_batches=own, **options).rates
    assert alone == [0.1 * 0.5 ** (step // steps) for step in range(8 // own)]
    assert one == alone[: len(one)]
    assert len(one) == 8 // own // 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([torch.ones(2)], "takes one torch DataLoader of a data set with a length, not list"),
        (DataLoader(range(8), batch_size=None), "SequentialSampler with batch_size=None"),
        (DataLoader(range(8), sampler=SubsetRandomSampler([1])), "the loader's SubsetRandom"),
    ],
)
def test_loaders_that_cannot_go_on_are_refused(tmp_path: Path, loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "none", Elastic(), loader=loader)


def test_replicas_that_cannot_share_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replicas=0 must be"):
        Elastic(replicas=0)
    with pytest.raises(ValueError, match="the 3 micro-batches of a step .* among 2 replicas"):
        Elastic(replicas=3).micro_batches_of(1, 2)

"""The private names of Lightning by which batches are read are where they were."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_dist.strategies.base import lightning_loaders
from tests.helpers.networks.models import make_trainer


class Reversed:
    """Gives the entries of a sampler from its end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(self.sampler))


@pytest.mark.parametrize(
    ("options", "name", "found"),
    [
        ({"batch_size": 2}, "batch_sampler", [[2, 3], [0, 1]]),
        ({"batch_size": None}, "sampler", [3, 2, 1, 0]),
    ],
)
def test_a_copy_of_a_loader_has_another_sampler(
    options: dict[str, Any], name: str, found: list[Any]
) -> None:
    def read(loader: DataLoader[Any]) -> list[Any]:
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]

    loader: DataLoader[Any] = DataLoader(range(4), **options)  # type: ignore[arg-type]
    own, samplers = read(loader), (loader.sampler, loader.batch_sampler)
    copied = lightning_loaders.copy_of_loader(loader, name, Reversed(getattr(loader, name)))
    assert read(copied) == found
    assert read(loader) == own
    assert (loader.sampler, loader.batch_sampler) == samplers


class Asking:
    """Notes whether Lightning's loops iterate it."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __iter__(self) -> Iterator[Any]:
        self.answers.append(lightning_loaders.is_iterated_by_loop())
        return iter([0])


def test_a_loader_knows_whether_lightnings_loops_iterate_it() -> None:
    asking = Asking()
    modes = ("min_size", "max_size", "max_size_cycle", "sequential")
    for mode in modes:
        list(CombinedLoader({"a": asking}, mode))  # type: ignore[arg-type]
    assert len(asking.answers) >= len(modes)
    assert all(asking.answers)
    asking.answers.clear()
    list(asking)
    next(iter(asking))
    assert asking.answers == [False, False]


class WithLoaders(L.LightningModule):
    def train_dataloader(self) -> list[str]:
        return ["train"]

    def val_dataloader(self) -> list[str]:
        return ["val"]


def test_loader_hooks_are_wrapped_where_lightning_calls_them() -> None:
    trainer, module = make_trainer(), WithLoaders()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    loop = trainer.fit_loop
    sources = [loop._data_source, loop.epoch_loop.val_loop._data_source]
    undo = lightning_loaders.replace_loader_hooks(trainer, lambda hook: lambda: ["mine", *hook()])
    assert [_request_dataloader(s) for s in sources] == [["mine", "train"], ["mine", "val"]]
    undo()
    assert [_request_dataloader(s) for s in sources] == [["train"], ["val"]]


class Overstated:
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


class Skipping(L.LightningModule):
    """Skips the rest of an epoch, if it is told to."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.found: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.skips and batch_idx == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...

    def on_train_epoch_end(self) -> None:
        self.found.append(lightning_loaders.batches_read(self.trainer))


@pytest.mark.parametrize(
    ("loader", "skips", "known"),
    [
        (Overstated(), False, (2, 5, True)),
        (range(2), False, (2, 2, True)),
        (range(5), True, (2, 5, False)),
    ],
)
def test_who_reads_a_loader_knows_how_far(
    loader: Any, skips: bool, known: tuple[int, int, bool]
) -> None:
    module, trainer = Skipping(skips), make_trainer()
    trainer.fit_loop.max_epochs = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    assert module.found == [known]


def test_only_a_resumed_run_tells_a_sampler_its_epoch_early() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader:
        sampler = Sampler()

    trainer, loader = L.Trainer(accelerator="cpu", logger=False), Loader()
    lightning_loaders.set_sampler_epoch(trainer, loader)
    assert loader.sampler.epochs == []
    trainer.fit_loop.epoch_progress.current.processed = 2
    lightning_loaders.set_sampler_epoch(trainer, loader)
    assert loader.sampler.epochs == [2]


def test_the_users_samplers_are_kept() -> None:
    trainer = make_trainer(use_distributed_sampler=True)
    assert trainer._accelerator_connector.use_distributed_sampler
    lightning_loaders.keep_users_samplers(trainer)
    assert not trainer._accelerator_connector.use_distributed_sampler


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (TrainerFn.FITTING, (["train"], "max_size_cycle")),
        (TrainerFn.VALIDATING, (["val"], "sequential")),
        (TrainerFn.TESTING, None),
    ],
)
def test_loaders_are_requested_ahead_of_a_run(function: TrainerFn, found: object) -> None:
    trainer, module = make_trainer(), WithLoaders()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.state.fn = function
    assert lightning_loaders.request_loaders(trainer) == found


class Doubling(L.LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 2 * batch


def test_a_batch_goes_through_the_hooks_on_its_way_to_a_step() -> None:
    trainer, module = make_trainer(precision="bf16-true"), Doubling()
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module)
    batch = lightning_loaders.to_step(trainer, torch.tensor([1.5]), torch.device("cpu"))
    assert batch.dtype == torch.bfloat16
    assert batch.item() == 3.0

"""Ranks whose epochs would end at different batches learn it at a batch that all of them have."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import DDPStrategy, FSDPStrategy
from lightning_dist.strategies.base.loaders.lengths import TrainingLengths
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool


class Ending(IterableDataset[Any]):
    """Ends earlier on one rank, and does not say when."""

    def __init__(self, *num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return islice(iter(make_data(16)), self.num_samples[int(os.environ["RANK"])])


def end_apart(limit: int | None, *num_samples: int) -> list[str]:
    messages = []
    for strategy in (DDPStrategy(timeout_s=20.0), FSDPStrategy(timeout_s=20.0)):
        trainer = make_trainer(devices=2, strategy=strategy, limit_train_batches=limit)
        try:
            trainer.fit(
                make_module(), DataLoader(Ending(*num_samples), batch_size=4), make_loader(8)
            )
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_streams_that_end_apart(workers: WorkerPool) -> None:
    for messages in workers.run(2, end_apart, None, 16, 8):
        assert len(messages) == 2
        assert all("ranks [1] (of [0, 1]) have ended after 2 batches" in text for text in messages)
    assert workers.run(2, end_apart, 2, 16, 8) == [[], []]


def end_before_the_limit(path: Path) -> None:
    trainer = make_trainer(devices=2, strategy=DDPStrategy(timeout_s=20.0), limit_train_batches=3)
    try:
        trainer.fit(make_module(), DataLoader(Ending(16, 8), batch_size=4), make_loader(8))
    except ValueError as error:
        path.with_suffix(f".{os.environ['RANK']}").write_text(str(error))
        os._exit(1)  # as a script ends; the other one waits for its gradients


def test_a_stream_that_ends_before_a_limit(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(CaseFailedError):
        workers.run(2, end_before_the_limit, tmp_path / "rank")
    text = (tmp_path / "rank.1").read_text()
    assert "ranks [1] (of [0, 1]) have ended after 2 batches to train on" in text


@pytest.mark.long
def test_a_stream_without_a_batch(workers: WorkerPool) -> None:
    for messages in workers.run(2, end_apart, None, 0, 8):
        assert len(messages) == 2
        assert all("ranks [0] (of [0, 1]) have ended after 0 batches" in text for text in messages)


class Shrinking(Classifier):
    """Has fewer batches in the second epoch, on one rank."""

    def train_dataloader(self) -> Any:
        return make_loader(16 - 8 * self.current_epoch * int(os.environ["RANK"]))


def reload() -> str:
    trainer = make_trainer(
        devices=2, strategy=DDPStrategy(), max_epochs=2, reload_dataloaders_every_n_epochs=1
    )
    with pytest.raises(ValueError, match="training batches") as caught:
        trainer.fit(make_module(Shrinking), val_dataloaders=make_loader(8))
    return str(caught.value)


def test_reloaded_data_is_compared_too(workers: WorkerPool) -> None:
    assert all("have [2, 1] training batches" in text for text in workers.run(2, reload))


class Overstated:
    """A loader that says that it has more batches than it has."""

    def __init__(self, num_samples: int) -> None:
        self.loader = make_loader(num_samples, 4)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(self.loader)


def overstate(strategy: Any, *sizes: int) -> tuple[int, dict[str, torch.Tensor]]:
    size = sizes[int(os.environ.get("RANK", "0"))]
    module = make_module()
    trainer = make_trainer(devices=len(sizes), strategy=strategy, max_epochs=2)
    trainer.fit(module, Overstated(size), make_loader(8))
    return trainer.global_step, state_of(module)


def overstate_apart(strategy: Any, path: Path) -> None:
    TrainingLengths.grace_seconds = 0.1
    try:
        overstate(strategy, 16, 8)
    except ValueError as error:
        path.with_suffix(f".{os.environ['RANK']}").write_text(str(error))
        os._exit(1)  # as a script ends; the other one waits for its gradients


def test_loaders_that_overstate_their_length_alike_end_as_on_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    steps, state = overstate("auto", 16)
    assert steps == 8
    for found_steps, found in workers.run(2, overstate, DDPStrategy(), 16, 16):
        assert found_steps == steps
        assert all(torch.allclose(found[n], v, 0, 1e-12) for n, v in state.items())


@pytest.mark.some("strategy0")
@pytest.mark.parametrize("strategy", [DDPStrategy(), FSDPStrategy()])
def test_a_rank_that_overstates_its_length_alone_is_named(
    workers: WorkerPool, strategy: Any, tmp_path: Path
) -> None:
    with pytest.raises(CaseFailedError):
        workers.run(2, overstate_apart, strategy, tmp_path / "rank")
    text = "The training loader of rank 1 says that it has 6 batches and has ended after 2"
    assert text in (tmp_path / "rank.1").read_text()

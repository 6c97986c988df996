"""The first rank of a data replica reads, a few batches ahead; its failure ends all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, Dataset

from lightning_dist import MeshStrategy, PipelineStrategy, TensorParallelStrategy
from tests.helpers.networks.models import (
    make_data,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced
from tests.integration.conformance.one_reader.common import (
    BATCH_SIZE,
    NUM_SAMPLES,
    STRATEGIES,
    Noisy,
)


class Writing(BasePredictionWriter):
    """Keeps which samples were predicted."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, *arguments: Any) -> None:
        self.indices.append(arguments[3])

    def write_on_epoch_end(self, *arguments: Any) -> None:
        self.indices.append(arguments[3])


def predict_written() -> Any:
    writing = Writing()
    trainer = make_trainer(devices=2, strategy=PipelineStrategy(), callbacks=[writing])
    trainer.predict(make_module(Synced), DataLoader(make_data(5), batch_size=2))
    return writing.indices


def test_all_ranks_know_which_samples_are_predicted(workers: WorkerPool) -> None:
    batches = [[0, 1], [2, 3], [4]]
    assert workers.run(2, predict_written) == [[*batches, [batches]]] * 2


class Failing(Dataset[Any]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if os.environ["RANK"] != "0":
            raise AssertionError("only the first rank reads")
        if index == 9:
            raise self.error(f"sample {index} is broken")
        return make_data(NUM_SAMPLES)[index]


def fail(error: type[Exception], strategy: str) -> tuple[str, str]:
    devices, make = STRATEGIES[strategy]
    trainer = make_trainer(devices=devices, strategy=make())
    try:
        trainer.fit(make_module(Synced), DataLoader(Failing(error), BATCH_SIZE), make_loader(8))
    except Exception as raised:
        return type(raised).__name__, f"{raised} {raised.__cause__}"
    return "nothing", ""


@pytest.mark.some("KeyError-pipedream")
@pytest.mark.parametrize("strategy", ["pipedream", "tp"])
@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_a_failing_dataset_ends_all_ranks_with_the_cause(
    workers: WorkerPool, error: type[Exception], strategy: str
) -> None:
    first, *others = workers.run(STRATEGIES[strategy][0], fail, error, strategy)
    assert first[0] == error.__name__
    assert "sample 9 is broken" in first[1]
    for kind, text in others:
        assert kind == ("ValueError" if error is ValueError else "RankFailedError")
        assert "sample 9 is broken" in text


class Counted(Dataset[Any]):
    """Adds a byte to a file for each batch that is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        with Path(self.path).open("ab") as file:
            file.write(b".")
        return make_data(BATCH_SIZE)[:]


class Slow(L.Callback):
    """Holds the last rank back, and keeps how many batches the first has read by then."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leads: list[int] = []

    def look(self, trainer: L.Trainer, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.03)
            self.leads.append(Path(self.path).stat().st_size - batch_idx - 1)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, batch_idx)

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.look(trainer, batch_idx)


def lead(strategy: str, folder: str) -> list[list[int]]:
    devices, make = STRATEGIES[strategy]
    found = []
    for run in ("fit", "predict"):
        path = f"{folder}/{run}"
        slow = Slow(path)
        trainer = make_trainer(devices=devices, strategy=make(), callbacks=[slow])
        loaders = [DataLoader(Counted(path), batch_size=None), make_loader(8)]
        getattr(trainer, run)(make_module(Synced), *loaders[: 2 if run == "fit" else 1])
        found.append(slow.leads)
    return found


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("strategy", ["1f1b", "pipedream", "tp"])
def test_the_reader_is_no_further_ahead_than_the_pipeline_is_deep(
    workers: WorkerPool, strategy: str, tmp_path: Path
) -> None:
    devices = STRATEGIES[strategy][0]
    leads = workers.run(devices, lead, strategy, str(tmp_path))[-1]
    assert [len(of) for of in leads] == [12, 12]
    assert max(max(of) for of in leads) <= devices


def read_each(draws_alone: bool) -> Any:
    L.seed_everything(5, verbose=False)
    if draws_alone and os.environ["RANK"] == "1":
        torch.rand(())
    data = Noisy()
    strategy = PipelineStrategy(num_microbatches=2, read="each")
    trainer = make_trainer(devices=2, strategy=strategy)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True)
    try:
        trainer.fit(make_module(Synced), loader, make_loader(8))
    except Exception as error:
        return f"{error} {error.__cause__}"
    return data.num_read, trainer.global_step


def test_each_rank_can_read_for_itself(workers: WorkerPool) -> None:
    assert workers.run(2, read_each, False) == [(NUM_SAMPLES, NUM_SAMPLES // BATCH_SIZE)] * 2


def test_ranks_that_draw_other_batches_are_refused(workers: WorkerPool) -> None:
    errors = workers.run(2, read_each, True)
    assert all("With read='each' all ranks must draw the same" in error for error in errors)


@pytest.mark.parametrize("strategy", [PipelineStrategy, TensorParallelStrategy, MeshStrategy])
def test_other_ways_to_read_are_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match="read='last'"):
        strategy(read="last")

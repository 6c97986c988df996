"""Calls of loggers in steps reach rank 0's loggers, and rank 0 prints, as on one device."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stdout
from math import nan
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import pytest
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from matplotlib import pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_dist import MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool

matplotlib.use("agg")


class Showing(Classifier):
    """Calls its loggers in steps, before the model and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: set[str] = set()

    def _show(self, name: str, x: Tensor, batch_idx: int) -> Tensor:
        board: Any = self.logger
        assert isinstance(board, TensorBoardLogger)
        self.folders.add(f"{board.save_dir}/{board.name}")
        board.log_metrics({f"{name}_begun": float(batch_idx)}, step=batch_idx)
        logits = self.model(x)
        board.experiment.add_histogram(f"{name}_logits", logits, batch_idx)
        board.experiment.add_scalar(f"{name}_mean", logits.detach().mean(), global_step=batch_idx)
        figure, axes = plt.subplots()
        axes.plot(logits.detach().flatten().numpy())
        board.experiment.add_figure(f"{name}_figure", figure, batch_idx)
        plt.close(figure)
        self.loggers[1].log_metrics({f"{name}_csv": float(logits.detach().mean())}, step=batch_idx)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self._show("train", batch[0], batch_idx), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._show("val", batch[0], batch_idx)


def show(devices: int, name: str, folder: str) -> set[str]:
    strategy: Any = "auto"
    if name == "mesh":
        strategy = MeshStrategy(pp=2, dp_replicate=2, dp_shard=1)
    elif name == "trace":  # whose first step is run ahead, too
        strategy = PipelineStrategy(layers="trace", num_microbatches=1)
    elif name != "one":
        count = "auto" if name == "pipedream" else 1
        strategy = PipelineStrategy(schedule=name, num_microbatches=count)
    loggers = [TensorBoardLogger(folder, name="board"), CSVLogger(folder, name="csv")]
    trainer = make_trainer(devices=devices, strategy=strategy, logger=loggers, max_epochs=1)
    module = make_module(Showing)
    trainer.fit(module, make_loader(24), make_loader(8))
    assert [type(logger) for logger in trainer.loggers] == [TensorBoardLogger, CSVLogger]
    # Others would open files of events, or runs of a service, beside those of rank 0.
    opened = [getattr(logger, "_experiment") is not None for logger in trainer.loggers]  # noqa: B009
    assert opened == [trainer.is_global_zero] * 2
    return module.folders


def shown(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, set[Any]], str]:
    """Reads numbers, with their steps, and names of histograms and images."""
    board = EventAccumulator(str(next(folder.joinpath("board").glob("version_*")))).Reload()
    tags = board.Tags()
    scalars = {
        tag: sorted((event.step, event.value) for event in board.Scalars(tag))
        for tag in tags["scalars"]
    }
    steps = {tag: {event.step for event in board.Histograms(tag)} for tag in tags["histograms"]}
    steps |= {tag: {event.step for event in board.Images(tag)} for tag in tags["images"]}
    (csv,) = folder.joinpath("csv").rglob("metrics.csv")
    return scalars, steps, csv.read_text().splitlines()[0]


@pytest.mark.some("1f1b", "pipedream")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "trace", "pipedream"])
def test_loggers_show_what_one_device_shows(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    one, two = (str(tmp_path / part) for part in ("one", "two"))
    (folders,) = workers.run(1, show, 1, "one", one)
    assert folders == {f"{one}/board"}
    assert workers.run(2, show, 2, name, two) == [{f"{two}/board"}] * 2
    (expected, steps, columns), (found, other_steps, other_columns) = map(
        shown, (tmp_path / "one", tmp_path / "two")
    )
    assert {"train_mean", "val_mean", "train_begun", "val_begun"} <= expected.keys()
    assert {"train_figure", "val_logits"} <= steps.keys()
    assert (found.keys(), other_steps, other_columns) == (expected.keys(), steps, columns)
    if name != "pipedream":  # whose weights are older
        for tag, values in expected.items():
            assert len(found[tag]) == len(values), tag
            for (step, value), (other, near) in zip(found[tag], values, strict=True):
                assert step == other
                assert value == pytest.approx(near, abs=1e-6), tag


def test_replicas_of_stages_show_the_first_one(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(4, show, 4, "mesh", str(tmp_path))
    scalars, steps, _ = shown(tmp_path)
    assert {"train_mean", "val_mean"} <= scalars.keys()
    assert {"train_figure", "val_logits"} <= steps.keys()


class Locked(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])
        logger: Any = self.logger
        logger.log_metrics({"lock": threading.Lock()})


def log_a_lock(folder: str) -> str:
    trainer: L.Trainer = make_trainer(
        devices=2, strategy=PipelineStrategy(), logger=[CSVLogger(folder)]
    )
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.validate(make_module(Locked), make_loader(8), verbose=False)
    return str(caught.value)


def test_what_cannot_be_pickled_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    for message in workers.run(2, log_a_lock, str(tmp_path)):
        assert "`self.loggers[0].log_metrics(...)` in a step is made by rank 0" in message
        assert "cannot pickle '_thread.lock'" in message


class Printing(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.print("batch", batch_idx)
        logits = self.model(batch[0])
        self.print(f"mean {float(logits.mean()):.9f}", batch[1], sep=": ")


def print_in_steps(devices: int) -> str:
    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy)
    with redirect_stdout(io.StringIO()) as printed:
        trainer.validate(make_module(Printing), make_loader(3, batch_size=1), verbose=False)
    return printed.getvalue()


def test_rank_zero_prints(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, print_in_steps, 1)
    assert expected.count("mean") == expected.count("batch") == 3
    assert workers.run(2, print_in_steps, 2) == [expected, ""]


class ForRankZero(Classifier):
    """Does something on rank 0 only, in the three ways that users do it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    @rank_zero_only
    def _note(self, text: str) -> None:
        self.noted.append(text)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            self.noted.append(f"begun {batch_idx}")
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self._note(f"train {float(loss.detach()):.9f}")
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0])
        if self.trainer.is_global_zero:
            self.noted.append(f"validated {float(logits.mean()):.9f}")


def note_on_rank_zero(devices: int, mesh: bool = False) -> tuple[list[str], float, list[int]]:
    strategy: Any = "auto"
    if mesh:
        strategy = MeshStrategy(pp=2, dp_replicate=2, dp_shard=1)
    elif devices > 1:
        strategy = PipelineStrategy(num_microbatches=1)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1)
    module = make_module(ForRankZero)
    trainer.fit(module, make_loader(24), make_loader(8))
    ranks = [trainer.global_rank, module.global_rank, getattr(rank_zero_only, "rank")]  # noqa: B009
    return module.noted, float(trainer.callback_metrics.get("zero", nan)), ranks


def test_code_for_rank_zero_has_the_loss(workers: WorkerPool) -> None:
    ((expected, loss, _),) = workers.run(1, note_on_rank_zero, 1)
    assert sorted({note.split()[0] for note in expected}) == ["begun", "train", "validated"]
    for rank, (noted, other_loss, ranks) in enumerate(workers.run(2, note_on_rank_zero, 2)):
        assert noted == expected, f"rank {rank}"
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert ranks == [rank] * 3


def test_code_for_rank_zero_is_one_replicas(workers: WorkerPool) -> None:
    noted = [part[0] for part in workers.run(4, note_on_rank_zero, 4, True)]
    assert [bool(part) for part in noted] == [True, False, True, False]
    assert noted[0] == noted[2]
    assert noted[0][0] == "begun 0"

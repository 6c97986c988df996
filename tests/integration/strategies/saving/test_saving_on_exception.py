"""What ends all ranks at one place is saved; of what ends one rank nothing is said to be."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "mesh": lambda: MeshStrategy(pp=2),
    "pipeline": PipelineStrategy,
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
    "async": lambda: FSDPStrategy(async_save=True),
}
AT_BATCH = 2


class Raises(L.Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] != AT_BATCH:
            return
        if trainer.global_rank in self.ranks:
            raise KeyError("a mistake in a hook")
        while True:  # not in a collective, which only an exit can end
            trainer.strategy.guard.check_peers()
            time.sleep(0.01)


class Sends(L.Callback):
    """Sends a signal to its own process on the second rank."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if args[-1] == AT_BATCH and trainer.global_rank == 1:
            os.kill(os.getpid(), self.signum)


class RaisesInStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == AT_BATCH:
            raise KeyError("a mistake in a step")
        return super().training_step(batch, batch_idx)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Resumable:
    """Gives the batches of an epoch, and goes on where a state says."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        x, y = make_data(48).tensors
        while self.place < len(self):
            part = slice(8 * self.place, 8 * self.place + 8)
            self.place += 1
            yield x[part], y[part]
        self.place = 0

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def fit_quietly(trainer: L.Trainer, module: Any, path: str | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not there: validation, and a checkpoint
        trainer.fit(module, Resumable(), ckpt_path=path)


def interrupted_fit(
    strategy: str, directory: str, cause: L.Callback | None, kind: str
) -> list[str]:
    """Gives what is on disk, and what was said about it."""
    # A shell starts what runs in the background with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    saves: Any = ModelCheckpoint(directory, save_top_k=0, save_on_exception=True)
    if kind == "on exception":
        saves = Kept(directory)
    module = make_module(Classifier if cause else RaisesInStep)
    trainer = make_trainer(
        devices=2,
        strategy=STRATEGIES[strategy](),
        callbacks=[saves, *([cause] if cause else [])],
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    heard = Heard()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(heard)
    with pytest.raises((Exception, SystemExit)) as caught:
        fit_quietly(trainer, module)
    logger.removeHandler(heard)
    said = [text for text in heard.texts if "saved" in text]
    return [type(caught.value).__name__, *said]


class Kept(OnExceptionCheckpoint):
    def teardown(self, *_: Any, **__: Any) -> None:
        """Leaves the file, which its parent removes."""


def saved_in(directory: Path) -> list[int]:
    found = [path for path in directory.iterdir() if not path.name.startswith(".")]
    return [load_full(path)["global_step"] for path in found]


@pytest.mark.some("on exception-pipedream")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["checkpoint", "on exception"])
def test_an_error_in_a_hook_of_all_ranks_is_saved(
    workers: WorkerPool, tmp_path: Path, strategy: str, kind: str
) -> None:
    results = workers.run(2, interrupted_fit, strategy, str(tmp_path), Raises((0, 1)), kind)
    assert [name for name, *_ in results] == ["KeyError"] * 2
    assert saved_in(tmp_path) == [AT_BATCH + 1]
    if kind == "checkpoint":
        assert "saved checkpoint to" in results[0][1]


@pytest.mark.some("checkpoint-mesh")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["checkpoint", "on exception"])
def test_an_error_of_one_rank_is_not_said_to_be_saved(
    workers: WorkerPool, tmp_path: Path, strategy: str, kind: str
) -> None:
    first, _ = workers.run(2, interrupted_fit, strategy, str(tmp_path), Raises((0,)), kind)
    name, (said,) = first[0], first[1:]
    assert name == "KeyError"
    assert said.startswith("No checkpoint was saved")
    assert saved_in(tmp_path) == []


@pytest.mark.some("pipeline-steps1")
@pytest.mark.parametrize(("strategy", "steps"), [("ddp", [AT_BATCH]), ("pipeline", [])])
def test_an_error_in_a_step_is_saved_where_ranks_step_alone(
    workers: WorkerPool, tmp_path: Path, strategy: str, steps: list[int]
) -> None:
    first, _ = workers.run(2, interrupted_fit, strategy, str(tmp_path), None, "checkpoint")
    assert saved_in(tmp_path) == steps
    assert ("No checkpoint was saved" in first[1]) == (not steps)


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_on_one_rank_ends_all_at_one_batch_and_is_saved(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    cause = Sends(signal.SIGINT)
    results = workers.run(2, interrupted_fit, strategy, str(tmp_path), cause, "checkpoint")
    assert [name for name, *_ in results] == ["SystemExit"] * 2
    (steps,) = saved_in(tmp_path)
    assert steps > AT_BATCH


def terminated_fits(
    strategy: str, directory: str, accumulate: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains with and without a SIGTERM after some batches, from which the run is resumed."""

    def fit(*callbacks: L.Callback, path: str | None = None) -> Any:
        module = make_module(Classifier, optimizer="adamw", dropout=0.1)
        trainer = make_trainer(
            devices=2,
            strategy=STRATEGIES[strategy](),
            callbacks=list(callbacks),
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            limit_val_batches=0,
            enable_checkpointing=bool(callbacks),
        )
        fit_quietly(trainer, module, path)
        return module

    os.environ["PL_GLOBAL_SEED"] = "5"
    L.seed_everything(5, verbose=False)
    whole = state_of(fit())
    saves = ModelCheckpoint(directory, filename="stopped", save_top_k=0, save_on_exception=True)
    L.seed_everything(5, verbose=False)
    with pytest.raises(SIGTERMException):
        fit(saves, Sends(signal.SIGTERM))
    (path,) = Path(directory).glob("stopped*")
    L.seed_everything(5, verbose=False)
    return whole, state_of(fit(path=str(path)))


@pytest.mark.some("5-ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mesh", "pipeline"])
@pytest.mark.parametrize("accumulate", [1, 5])
def test_a_run_that_was_told_to_stop_goes_on_exactly(
    workers: WorkerPool, tmp_path: Path, strategy: str, accumulate: int
) -> None:
    """With five batches to a step, it is told inside of one."""
    for whole, resumed in workers.run(2, terminated_fits, strategy, str(tmp_path), accumulate):
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.allclose(value, resumed[name], rtol=1e-12, atol=0), name


class SendsInValidation(Sends):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.num_validated = 0

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_validation_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, self.num_validated)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.num_validated += 1


def stop_in_validation(strategy: str, directory: str, epochs: int) -> int:
    sends = SendsInValidation(signal.SIGTERM)
    saves = ModelCheckpoint(directory, save_top_k=0, save_on_exception=True)
    trainer = make_trainer(
        devices=2,
        strategy=STRATEGIES[strategy](),
        callbacks=[sends, saves],
        enable_checkpointing=True,
        max_epochs=epochs,
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(make_module(), make_loader(), make_loader(64))
    return sends.num_validated


@pytest.mark.some("1-pipeline")
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_stops_behind_a_validation_which_may_be_the_last(
    workers: WorkerPool, tmp_path: Path, strategy: str, epochs: int
) -> None:
    assert workers.run(2, stop_in_validation, strategy, str(tmp_path), epochs) == [8, 8]
    (steps,) = saved_in(tmp_path)
    assert steps == 6 if epochs == 1 else 6 < steps <= 8

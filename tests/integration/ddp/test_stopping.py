"""Whoever asks a run to stop, all ranks stop at the same batch."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy
from tests.helpers.models import Classifier, make_loader, make_module, make_trainer, share_of
from tests.helpers.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "stages": lambda: MeshStrategy(pp=2),
}


class Stopping(Classifier):
    """Asks in one place of its code, at its third batch or at the last one, on some ranks."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.where, self.ranks = where, ranks
        self.did: list[str] = []

    def ask(self, where: str, batch_idx: int | None = None) -> bool:
        rank = int(os.environ.get("RANK", "0"))
        place = 5 if self.where.endswith("last") else 2
        asks = (
            where == self.where.split(",")[0] and batch_idx in (None, place) and rank in self.ranks
        )
        if asks and where != "skip":
            self.trainer.should_stop = True
        return asks

    def on_train_start(self) -> None:
        self.ask("train start")

    def on_train_epoch_start(self) -> None:
        self.ask("epoch start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.ask("skip", batch_idx) else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ask("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.did.append("step")
        self.ask("batch end", batch_idx)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.did.append("validation")
            self.ask("validation end")

    def on_train_epoch_end(self) -> None:
        self.did.append("epoch")
        self.ask("epoch end")


WHERE = [
    "train start",
    "epoch start",
    "skip",
    "skip, last",
    "step",
    "batch end",
    "validation end",
    "epoch end",
]


THREE = ["step"] * 3
FOUR = ["step"] * 4


def fit(where: str, ranks: tuple[int, ...], **options: Any) -> list[str]:
    module = make_module(Stopping, where=where, ranks=ranks)
    trainer = make_trainer(max_epochs=2, val_check_interval=4, **options)
    strategies = (DDPStrategy, FSDPStrategy)
    is_apart = isinstance(options.get("strategy"), strategies)
    loader = share_of(int(os.environ["RANK"]), 48) if is_apart else make_loader(48)
    own = module.on_train_batch_start
    trainer.fit(module, loader, make_loader(8))
    assert module.on_train_batch_start == own
    return [*module.did, str(trainer.global_step)]


def fit_all(strategy: str, ranks: tuple[int, ...], where: list[str]) -> list[list[str]]:
    return [fit(w, ranks, devices=2, strategy=STRATEGIES[strategy]()) for w in where]


LATER = {  # what happens when one of two ranks asks
    "train start": ["0"],
    "epoch start": ["epoch", "0"],
    "skip": [*THREE, "epoch"] * 2 + ["6"],
    "skip, last": [*FOUR, "validation", "step", "step", "epoch"] * 2 + ["12"],
    "step": [*FOUR, "validation", "epoch", "4"],
    "batch end": [*FOUR, "validation", "epoch", "4"],
    "validation end": [*FOUR, "validation", "epoch", "4"],
    "epoch end": [*FOUR, "validation", "step", "step", "epoch", "6"],
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_that_asks_stops_all_a_batch_later(workers: WorkerPool, strategy: str) -> None:
    ranks = workers.run(2, fit_all, strategy, (1,), WHERE)
    assert ranks[0] == ranks[1] == [LATER[where] for where in WHERE]


@pytest.mark.parametrize("strategy", ["ddp", "stages"])
def test_all_ranks_that_ask_stop_where_one_device_does(
    workers: WorkerPool, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(2, fit_all, strategy, (0, 1), WHERE)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = [fit(where, (0,), devices=1) for where in WHERE]
    assert ranks[0] == ranks[1] == alone


class Interrupted(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        raise KeyError


def test_a_run_that_fails_leaves_no_change_behind(workers: WorkerPool) -> None:
    assert workers.run(2, fail) == [True, True]


def fail() -> bool:
    module = make_module(Stopping, where="nowhere", ranks=())
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), callbacks=[Interrupted()])
    with pytest.raises(KeyError):
        trainer.fit(module, make_loader(16), make_loader(8))
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    changed = {"run", "on_run_start", "on_advance_end", "setup_data"}
    return not any(changed & set(vars(loop)) for loop in loops)

"""Whoever asks a run to stop, all ranks stop at the same batch."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Timer

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    share_of,
)
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tensor": lambda: TensorParallelStrategy(plan={"model.*.linear": "colwise_gather"}),
    "stages": lambda: MeshStrategy(pp=2),
    "pipeline": PipelineStrategy,
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
    "2bw": lambda: PipelineStrategy(schedule="pipedream_2bw"),
    "pipeline 2x2": lambda: PipelineStrategy(num_stages=2),
    "mesh 2x2": lambda: MeshStrategy(pp=2, dp_shard=2),
    "pipedream of 4": lambda: PipelineStrategy(schedule="pipedream"),
    "2bw of 4": lambda: PipelineStrategy(schedule="pipedream_2bw"),
}


class Stopping(Classifier):
    """Asks in one place of its code, at its third batch or at the last one, on some ranks."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__(depth=2)
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


def fit(where: str, ranks: tuple[int, ...], num_samples: int = 48, **options: Any) -> list[str]:
    module = make_module(Stopping, where=where, ranks=ranks)
    trainer = make_trainer(**{"max_epochs": 2, "val_check_interval": 4, **options})
    strategies = (DDPStrategy, FSDPStrategy)
    is_apart = isinstance(options.get("strategy"), strategies)
    loader = (
        share_of(int(os.environ["RANK"]), num_samples) if is_apart else make_loader(num_samples)
    )
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


AT_ONCE = {"step": [*THREE, "validation", "epoch", "3"]}  # the last stage tells of its step
# By two batches the first of two stages is ahead, if nothing makes the stages meet.
TWO_LATER = {"skip": [*FOUR, "validation", "epoch"] * 2 + ["8"]}


@pytest.mark.some("2bw-0-*")
@pytest.mark.parametrize(
    ("strategy", "rank", "other"),
    [
        ("ddp", 1, {}),
        ("fsdp", 1, {}),
        ("tensor", 0, {}),
        ("stages", 0, {}),
        ("stages", 1, AT_ONCE),
        ("pipeline", 0, {}),
        ("pipeline", 1, AT_ONCE),
        ("pipedream", 0, TWO_LATER),
        ("pipedream", 1, TWO_LATER),
        ("2bw", 0, TWO_LATER),
    ],
)
def test_one_rank_that_asks_stops_all_some_batches_later(
    workers: WorkerPool, strategy: str, rank: int, other: dict[str, list[str]]
) -> None:
    ranks = workers.run(2, fit_all, strategy, (rank,), WHERE)
    assert ranks[0] == ranks[1] == [{**LATER, **other}[where] for where in WHERE]


def fit_on_four(strategy: str, rank: int) -> list[list[str]]:
    options = {"devices": 4, "num_samples": 80, "val_check_interval": 9}
    return [fit(where, (rank,), strategy=STRATEGIES[strategy](), **options) for where in FAR]


FAR = ["skip", "step", "batch end"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["pipeline 2x2", "mesh 2x2", "pipedream of 4", "2bw of 4"])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_all_of_four_ranks_stop_at_the_same_batch(
    workers: WorkerPool, strategy: str, rank: int
) -> None:
    did = workers.run(4, fit_on_four, strategy, rank)
    assert did[0] == did[1] == did[2] == did[3]
    for (*_, steps), where in zip(did[0], FAR, strict=True):
        assert int(steps) < (18 if where == "skip" else 9)


@pytest.mark.some("pipeline")
@pytest.mark.parametrize("strategy", ["ddp", "stages", "pipeline"])
def test_all_ranks_that_ask_stop_where_one_device_does(
    workers: WorkerPool, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(2, fit_all, strategy, (0, 1), WHERE)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = [fit(where, (0,), devices=1) for where in WHERE]
    assert ranks[0] == ranks[1] == alone


def fit_at_least(strategy: str, least: dict[str, int]) -> list[str]:
    return fit("batch end", (1,), devices=2, strategy=STRATEGIES[strategy](), **least)


@pytest.mark.some("least0-6-ddp", "least0-6-pipedream", "least1-6-ddp")
@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "pipedream"])
@pytest.mark.parametrize(
    ("least", "steps"), [({"min_steps": 5}, 6), ({"min_epochs": 1}, 6), ({"min_steps": 10}, 10)]
)
def test_a_wish_waits_for_the_least_number_of_steps(
    workers: WorkerPool, strategy: str, least: dict[str, int], steps: int
) -> None:
    did = workers.run(2, fit_at_least, strategy, least)
    assert did[0] == did[1]
    assert int(did[0][-1]) == steps


DAY = timedelta(days=1)


class Late(L.Callback):
    """Moves one rank's clock on at its third batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if args[-1] == 2 and trainer.global_rank == self.rank:
            trainer._last_val_time = -math.inf
            for timer in (c for c in trainer.callbacks if isinstance(c, Timer)):
                timer._offset = 2 * DAY.total_seconds()


def fit_by_the_clock(strategy: str, rank: int, options: dict[str, Any]) -> list[str]:
    ranks = {"devices": 2, "strategy": STRATEGIES[strategy](), "callbacks": [Late(rank)]}
    return fit("nowhere", (), **ranks, **options)


@pytest.mark.some("fsdp", "pipedream")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "stages", "pipeline", "pipedream"])
def test_the_first_ranks_timer_stops_all(workers: WorkerPool, strategy: str) -> None:
    options = {"max_time": DAY}
    did = workers.run(2, fit_by_the_clock, strategy, 0, options)
    assert did == [[*THREE, "validation", "epoch", "3"]] * 2


@pytest.mark.some("0-pipedream-5", "1-ddp-4", "1-pipedream-5")
@pytest.mark.parametrize(("strategy", "steps"), [("ddp", 4), ("pipeline", 4), ("pipedream", 5)])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_validate_when_one_of_them_says_that_it_is_time(
    workers: WorkerPool, strategy: str, steps: int, rank: int
) -> None:
    options = {"val_check_interval": DAY, "check_val_every_n_epoch": None}
    did = workers.run(2, fit_by_the_clock, strategy, rank, options)
    assert did[0] == did[1]
    assert did[0].index("validation") == steps


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
    changed = {"run", "on_run_start", "on_advance_end", "setup_data", "_should_check_val_fx"}
    return not any(changed & set(vars(loop)) for loop in loops)

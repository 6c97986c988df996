"""A rank that does not wait for another one learns of its failure where it is about to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import Strategy

from lightning_dist import DDPStrategy, FSDPStrategy
from lightning_dist.engine.comms.failures.peer_failure import Failure, RankFailedError
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class OneFails(L.Callback):
    """Fails on the last rank; the others are busy until they know."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            raise KeyError("its own mistake")
        while trainer.strategy.guard.is_sound:
            time.sleep(0.01)


class OthersMeet(OneFails):
    """The others do, too, what all ranks must do together."""

    def __init__(self, meet: Callable[[Any], object]) -> None:
        self.meet = meet

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        self.meet(trainer.strategy)
        raise AssertionError("must not come here")


def drain(strategy: Any) -> None:
    strategy.drain()


def meet(strategy: Any) -> None:
    strategy.barrier()


def speak(strategy: Any) -> None:
    strategy.broadcast("a word")


def vote(strategy: Any) -> None:
    strategy.reduce_boolean_decision(True)


def fit(make: Callable[[], Strategy], meeting: Callable[[Any], object] | None) -> str:
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    callback = OneFails() if meeting is None else OthersMeet(meeting)
    trainer = make_trainer(devices=2, strategy=make(), callbacks=[callback])
    with pytest.raises(KeyError if is_last else RankFailedError) as caught:
        trainer.fit(make_module(), make_loader(16), make_loader(8))
    return str(caught.value)


@pytest.mark.some("FSDPStrategy-drain")
@pytest.mark.parametrize(
    ("make", "meeting"),
    [
        (DDPStrategy, None),
        (FSDPStrategy, None),
        (DDPStrategy, drain),
        (FSDPStrategy, drain),
        (DDPStrategy, meet),
        (DDPStrategy, speak),
        (DDPStrategy, vote),
    ],
)
def test_the_others_end_with_it(
    workers: WorkerPool, make: Callable[[], Strategy], meeting: Callable[[Any], object] | None
) -> None:
    other, _ = workers.run(2, fit, make, meeting)
    assert other == "Rank 1 failed first: KeyError: 'its own mistake'"


class Outliving(DDPStrategy):
    """Goes on behind any other rank's failure, and knows when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.has_outlived = threading.Event()

    def outlives(self, failure: Failure) -> bool:
        self.has_outlived.set()
        return True


class FailsBehind(L.Callback):
    """The last rank fails, and the others do when they have heard of that, and a pause later."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.raised_at = self.reported_at = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_rank == trainer.world_size - 1:
            raise KeyError("its own mistake")
        assert strategy.has_outlived.wait(20.0)
        time.sleep(self.pause)
        self.raised_at = time.monotonic()
        raise RuntimeError("a later one")

    def on_exception(self, *_: Any) -> None:
        self.reported_at = time.monotonic()


def fail_behind(pause: float) -> tuple[str, float]:
    callback = FailsBehind(pause)
    trainer = make_trainer(devices=2, strategy=Outliving(), callbacks=[callback])
    with pytest.raises((KeyError, RuntimeError)) as caught:
        trainer.fit(make_module(), make_loader(16), make_loader(8))
    return str(caught.value), callback.reported_at - callback.raised_at


def test_a_report_waits_for_no_news_when_the_rank_has_outlived_them(workers: WorkerPool) -> None:
    (error, seconds), _ = workers.run(2, fail_behind, 0.0)
    assert error == "a later one"
    assert seconds < 1.8  # the wait for news is of two seconds


@pytest.mark.long
def test_a_report_waits_for_news_when_those_that_it_has_outlived_are_old(
    workers: WorkerPool,
) -> None:
    (error, seconds), _ = workers.run(2, fail_behind, 2.5)
    assert error == "a later one"
    assert seconds > 1.9

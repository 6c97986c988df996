"""Cuts that cannot be had, and layers that do not come."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from lightning_dist.engine.pipeline.rebalance import relocation
from lightning_dist.strategies.pipelining import movable_layers
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.rebalance.moving_common import (
    ToAndFro,
)


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3)))
        self.model[2].weight = self.model[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0].flatten(1)).square().mean()


class Asking(L.Callback):
    """Asks for cuts that cannot be had, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def ask(self, strategy: Any, cut: list[int]) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011  (what it says is returned)
            strategy.repartition(cut)
        self.answers.append(str(error.value))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        rank = trainer.strategy.global_rank
        for cut in ([1, 9], [1 + rank, 2 - rank], [2, 1]):
            self.ask(trainer.strategy, cut)


def refusal_of(partition: Any, callback: L.Callback) -> str:
    strategy = PipelineStrategy(partition=partition)
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[callback], limit_val_batches=0)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (what it says is returned)
        trainer.fit(make_module(Tied).float(), make_loader(8), make_loader(8))
    return str(error.value)


def refuse_at_start() -> list[str]:
    return [
        refusal_of("profile", L.Callback()),
        refusal_of([1, 2], StageBalancer(action="rebalance")),
    ]


def test_what_could_not_move_is_refused_before_anything_runs(
    workers: WorkerPool,
) -> None:
    for answers in workers.run(2, refuse_at_start):
        assert all("'0.weight'" in answer and "one by one" in answer for answer in answers)


def ask() -> list[str]:
    asking, strategy = Asking(), PipelineStrategy(partition=[1, 2])
    asking.ask(strategy, [2, 1])
    make_trainer(devices=2, strategy=strategy, callbacks=[asking], limit_val_batches=0).fit(
        make_module(Tied), make_loader(8), make_loader(8)
    )
    return asking.answers


def test_bad_cuts_are_refused_alike(workers: WorkerPool) -> None:
    first, second = workers.run(2, ask)
    assert first == second
    for answer, part in zip(
        first,
        (
            r"repartition([2, 1]) was called while the model is not cut",
            "partition=[1, 9] must give each of the 2 stages at least one layer and sum to the 3",
            "Rank 0 asks for the cut [1, 2], and rank 1 for [2, 1]",
            "The parameters '0.weight' (stage 0) and '2.weight' (stage 1) are tied",
        ),
        strict=True,
    ):
        assert part in answer


class Stubborn(nn.Linear):
    """Cannot be taken along."""

    def get_extra_state(self) -> Any:
        raise KeyError("a layer that does not want to go")


class OfStubborn(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), Stubborn(12, 12), nn.Linear(12, 3))


def slow_down(strategy: PipelineStrategy, where: str) -> None:
    """Lets a rank come to the exchange of layers, or to its channels, when the other has failed."""
    module, name = {
        "exchange": (movable_layers, "LayerExchange"),
        "channels": (relocation.LayerExchange, "_connect"),
    }[where]
    own = getattr(module, name)

    def late(*args: Any, **options: Any) -> Any:
        setattr(module, name, own)
        deadline = time.monotonic() + 10
        while strategy.guard.is_sound and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # the news is interrupting whatever waits
        return own(*args, **options)

    setattr(module, name, late)


def fail(where: str | None) -> str:
    strategy = PipelineStrategy(partition=[1, 2])
    if where is not None and os.environ["RANK"] == "0":
        slow_down(strategy, where)
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[ToAndFro((1, 0))])
    with pytest.raises((KeyError, RankFailedError)) as error:
        trainer.fit(make_module(OfStubborn), make_loader(8), make_loader(8))
    return type(error.value).__name__


@pytest.mark.some("exchange")
@pytest.mark.parametrize("late", [None, "exchange", "channels"])
def test_a_rank_that_waits_for_a_layer_learns_that_it_does_not_come(
    workers: WorkerPool, late: str | None
) -> None:
    begin = time.monotonic()
    waited, failed = workers.run(2, fail, late)
    assert (waited, failed) == ("RankFailedError", "KeyError")
    assert time.monotonic() - begin < 20

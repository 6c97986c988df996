"""A step's loggers note calls, and open nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCalls


class Run:
    """An experiment as W&B's, with parts that are written to."""

    def __init__(self) -> None:
        self.summary: dict[str, float] = {}
        self.config = self.summary


class Service(CSVLogger):
    """Opens a run whenever one asks for it."""

    run: Run | None = None

    @property
    def experiment(self) -> Any:
        self.run = self.run or Run()
        return self.run


def rank(loggers: list[Logger], *, is_source: bool) -> RankZeroCalls:
    trainer = SimpleNamespace(loggers=loggers, is_global_zero=not is_source)
    module = SimpleNamespace(trainer=trainer, loggers=loggers, print=print)
    return RankZeroCalls(cast("pl.LightningModule", module), is_source=is_source)


def test_what_a_step_writes_to_an_experiment_is_written_on_rank_zero(tmp_path: Any) -> None:
    theirs, ours = Service(tmp_path), Service(tmp_path)
    last = rank([theirs], is_source=True)
    with last.in_step():
        logger: Any = last._module.trainer.loggers[0]
        assert isinstance(logger, Service)
        assert logger.name == theirs.name
        logger.experiment.summary["best"] = 1.0
        logger.experiment.config.update({"worst": 2.0})
        assert not hasattr(logger.experiment, "__array__")
    rank([ours], is_source=False).make(last.take())
    assert ours.run is not None
    assert ours.run.summary == {"best": 1.0, "worst": 2.0}
    assert theirs.run is None

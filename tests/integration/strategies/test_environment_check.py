"""Ranks with other variables are found at the start of a run."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from lightning_dist import DDPStrategy, PipelineStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


def fit(strategy: Any) -> tuple[list[str], str]:
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(make_module(), make_loader(8))
        except ValueError as error:
            return [], str(error)
    return [str(w.message) for w in caught if "different environments" in str(w.message)], ""


def fit_with_other_variable() -> list[tuple[list[str], str]]:
    if os.environ["RANK"] == "1":
        os.environ["NCCL_ALGO"] = "Ring"
    return [
        fit(DDPStrategy(check_environment="off")),
        fit(DDPStrategy()),
        fit(PipelineStrategy(check_environment="error")),
    ]


def test_another_variable_is_named_with_its_host(workers: WorkerPool) -> None:
    (off, warned, refused), other = workers.run(2, fit_with_other_variable)
    assert off == ([], "")
    [text] = warned[0]
    assert "NCCL_ALGO  (not set)" in text
    assert f"Ring       {os.uname().nodename} (rank 1)" in text
    assert other[:2] == [([], ""), ([], "")]  # rank 0 warns for all
    # An error is the same on each rank.
    assert refused == other[2]
    assert "NCCL_ALGO" in refused[1]


def test_an_unknown_way_to_check_is_refused() -> None:
    with pytest.raises(ValueError, match="check_environment='no'.*'off'"):
        DDPStrategy(check_environment="no")  # type: ignore[arg-type]

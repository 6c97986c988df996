"""A run goes on inside of an epoch on another number of ranks, with the steps that it had left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_dist.checkpoint import load_full
from tests.helpers.processes.elastic_fit import STRATEGIES, Ends, fit
from tests.helpers.processes.workers import WorkerPool

SAMPLES = 35  # 4 steps of two replicas, and 3 samples are left out


def fit_to(strategy: str, folder: str, replicas: int | None, batch: int) -> int:
    with pytest.raises(SIGTERMException) as caught:
        fit(strategy, folder, SAMPLES, replicas, Ends(batch))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def weights_in(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_full(folder / "last.ckpt")["state_dict"]
    return weights


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_and_more_ranks_go_on_with_the_same_steps(
    workers: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    """One replica is told to stop inside of a step."""
    one = 2 if strategy in ("1f1b", "mesh") else 1  # ranks of one replica
    found, whole = tmp_path / "found", tmp_path / "whole"
    assert workers.run(2 * one, fit_to, strategy, str(found), 2, 1) == [143] * 2 * one
    assert workers.run(one, fit_to, strategy, str(found), 2, 11) == [143] * one
    assert workers.run(2 * one, fit, strategy, str(found), SAMPLES, 2) == [12] * 2 * one
    assert workers.run(2 * one, fit, strategy, str(whole), SAMPLES, 2) == [12] * 2 * one
    assert_near(weights_in(found), weights_in(whole))

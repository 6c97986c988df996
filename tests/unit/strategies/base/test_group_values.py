from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_dist.strategies.base.model_checks import (
    check_dense_gradients,
    check_group_values,
    check_learning_rates,
)

Check = Callable[[list[Optimizer], Any], None]


@pytest.fixture(autouse=True)
def gather(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Gives what the second rank has to say."""
    other: list[object] = []

    def all_gather(found: list[object], own: object, group: object) -> None:
        found[:] = [own, other[0]]

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather)
    return other  # type: ignore[return-value]


def sgd(**values: object) -> Optimizer:
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))]}, {"params": []}], lr=0.1)
    optimizer.param_groups[0].update(values)
    return optimizer


def test_equal_values_and_groups_of_other_ranks_pass(gather: list[object]) -> None:
    gather.append([("SGD", [{"lr": 0.1, "d": 2.0, "bad": float("nan")}, {"k": 3.0}])])
    check_group_values([sgd(d=torch.tensor(2.0), bad=float("nan"))], None)  # type: ignore[arg-type]


def test_other_values_are_refused_by_name(gather: list[object]) -> None:
    gather.append([("SGD", [{"lr": 0.1, "d": 2.5}, {}])])
    with pytest.raises(ValueError, match=r"group 0 .*'d' \(2.0 on rank 0, 2.5 on rank 1\)"):
        check_group_values([sgd(d=2.0)], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", [check_group_values, check_learning_rates])
def test_other_rates_point_at_schedulers(gather: list[object], check: Check) -> None:
    gather.append([("SGD", [{"lr": 0.01, "d": 2.0}, {}])])
    message = r"SGD.*parameter group 0 .*0.1 on rank 0, 0.01 on rank 1.*`sync_dist=True`"
    with pytest.raises(ValueError, match=message):
        check([sgd(d=2.0)], None)


def test_replicas_may_round_their_estimates_differently(gather: list[object]) -> None:
    gather.append([("SGD", [{"lr": 0.1, "d": 2.5}, {}])])
    check_learning_rates([sgd(d=2.0)], None)  # type: ignore[arg-type]


def test_only_what_is_trained_must_have_dense_gradients() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2))
    with pytest.raises(ValueError, match=r"of \['0'\] are sparse, and servers take dense"):
        check_dense_gradients(model, "servers")
    check_dense_gradients(model.requires_grad_(False), "servers")

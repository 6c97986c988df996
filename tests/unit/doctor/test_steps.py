from __future__ import annotations

import torch

from lightning_dist.doctor.report import Result, Status
from lightning_dist.doctor.steps import judge_weights, train_alone
from lightning_dist.engine.common.mesh_shape import MeshShape


def judged(trained: float, *, is_exact: bool = True) -> Result:
    right = {"weight": torch.zeros(2, dtype=torch.float64)}
    weights = {"weight": torch.tensor([0.0, trained], dtype=torch.float64)}
    return judge_weights(MeshShape(dp_replicate=2), weights, right, is_exact=is_exact)


def test_weights_that_differ_from_those_of_one_device_are_a_failure() -> None:
    assert judged(1e-15).status is Status.OK
    result = judged(1e-6)
    assert result.status is Status.FAIL
    assert "ten steps on dp_replicate 2: a weight differs by 1.0e-06" in result.found


def test_stale_weights_are_not_compared_but_must_be_finite() -> None:
    assert judged(1e-2, is_exact=False).status is Status.OK
    assert judged(float("nan"), is_exact=False).status is Status.FAIL
    assert judged(float("inf")).status is Status.FAIL


def test_one_device_trains_each_batch_of_all_replicas() -> None:
    one, other = train_alone(MeshShape(pp=2)), train_alone(MeshShape(dp_shard=2))
    # As many rows, in more layers: the toy of a mesh is its own.
    assert len(one) == 2 * len(other)
    again = train_alone(MeshShape(pp=2))
    assert all(torch.equal(one[name], again[name]) for name in one)

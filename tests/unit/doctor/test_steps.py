from __future__ import annotations

import torch

from lightning_dist.doctor.check import Choice
from lightning_dist.doctor.result import Status
from lightning_dist.doctor.steps import StepFacts, judge_steps, train_alone
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.strategies.ddp import DDPStrategy
from tests.unit.doctor.facts import ONE_HOST, with_mesh

RUN = with_mesh(ONE_HOST, dp_replicate=2)
EXACT, STALE = Choice("mesh", DDPStrategy), Choice("mesh", DDPStrategy, is_exact=False)


def test_weights_that_differ_from_those_of_one_device_are_a_failure() -> None:
    assert judge_steps(RUN, {0: StepFacts(1e-15)}, choice=EXACT).status is Status.OK
    result = judge_steps(RUN, {0: StepFacts(1e-6)}, choice=EXACT)
    assert result.status is Status.FAIL
    assert "ten steps on dp_replicate 2: a weight differs by 1.0e-06" in result.found


def test_stale_weights_are_not_compared_but_must_be_finite() -> None:
    assert judge_steps(RUN, {0: StepFacts(1e-2)}, choice=STALE).status is Status.OK
    result = judge_steps(RUN, {0: StepFacts(1e-2, is_finite=False)}, choice=STALE)
    assert result.status is Status.FAIL


def test_one_device_trains_each_batch_of_all_replicas() -> None:
    one, other = train_alone(MeshShape(pp=2)), train_alone(MeshShape(dp_shard=2))
    # As many rows, in more layers: the toy of a mesh is its own.
    assert len(one) == 2 * len(other)
    again = train_alone(MeshShape(pp=2))
    assert all(torch.equal(one[name], again[name]) for name in one)

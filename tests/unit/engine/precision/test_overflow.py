from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.precision.overflow import (
    AllReducedOverflow,
    AsyncOverflow,
    Overflow,
    _vote,
    are_finite,
)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_element_is_enough(bad: float) -> None:
    gradients = [torch.zeros(3), torch.full((2, 2), 3e38)]
    assert are_finite(gradients)
    assert are_finite([])
    gradients[1][1, 0] = bad
    assert not are_finite(gradients)


def test_gradients_of_several_devices_have_one_vote() -> None:
    # The first device stands for a GPU, the host has offloaded shards.
    gradients = [torch.zeros(3, device="meta"), torch.zeros(3)]
    assert _vote(gradients, torch.device("meta")).is_meta


def test_each_step_is_told_once() -> None:
    overflow = Overflow()
    assert not overflow.decide([torch.ones(2)])
    assert overflow.decide([torch.tensor(float("nan"))])
    assert list(overflow.outcomes()) == [False, True]
    assert list(overflow.outcomes()) == []


META = torch.device("meta")
"""A device whose tensors have no values: reading one fails."""


@pytest.mark.parametrize("gradients", [[], [torch.ones(2, device=META)]])
def test_a_vote_is_on_the_device_and_posted_unread(
    sent: list[Tensor], gradients: list[Tensor]
) -> None:
    overflow = AsyncOverflow(DeviceGroup(dist.ProcessGroup(0, 1), META), lambda: 0)
    overflow.post(0, gradients)
    assert [(vote.device, vote.dtype) for vote in sent] == [(META, torch.int32)]


@pytest.mark.parametrize(("gradient", "found"), [(1.0, 0), (float("nan"), 1)])
def test_the_decision_is_read_from_the_sum(sent: list[Tensor], gradient: float, found: int) -> None:
    overflow = AllReducedOverflow(DeviceGroup(dist.ProcessGroup(0, 1), torch.device("cpu")))
    assert overflow.decide([torch.tensor([gradient])]) == bool(found)
    assert [int(vote) for vote in sent] == [found]

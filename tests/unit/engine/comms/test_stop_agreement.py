"""What one rank is asked for while others are asked for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.votes import StopAgreement, StopReason


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What this rank, which is alone, has sent."""
    sent: list[list[int]] = []
    work = SimpleNamespace(wait=lambda: None)

    def all_reduce(tensor: Tensor, **_: Any) -> Any:
        sent.append(tensor.tolist())
        return work

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return sent


def test_a_reason_that_is_obeyed_hides_no_other() -> None:
    group: Any = None
    agreement = StopAgreement(group, lag=0)
    assert agreement.at_boundary() is StopReason.NONE
    agreement.request(StopReason.TERMINATE)
    agreement.request(StopReason.REQUEUE)
    assert agreement.at_boundary() is StopReason.REQUEUE
    agreement.go_on(StopReason.REQUEUE)
    assert agreement.at_boundary() is StopReason.TERMINATE
    assert agreement.requested is StopReason.TERMINATE


def test_a_reason_comes_again_where_it_is_asked_for_again() -> None:
    group: Any = None
    agreement = StopAgreement(group, lag=1)
    reasons = []
    for boundary in range(8):
        if boundary in (1, 5):
            agreement.request(StopReason.REQUEUE)
        reasons.append(agreement.at_boundary())
        if reasons[-1] is StopReason.REQUEUE:
            agreement.go_on(StopReason.REQUEUE)
    assert [i for i, reason in enumerate(reasons) if reason] == [2, 6]


def test_a_vote_and_the_flags_of_the_next_boundary_travel_together(sent: list[list[int]]) -> None:
    group: Any = None
    agreement = StopAgreement(group, lag=0)
    agreement.request(StopReason.INTERRUPT)
    _, votes = agreement.post(1)
    assert votes[0] == 1
    assert agreement.at_boundary() is StopReason.INTERRUPT
    assert sent == [[1, 0, 1, 0]]
    agreement.at_boundary()
    assert sent == [[1, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("lag", [0, 2])
def test_votes_without_a_boundary_between_them_delay_nothing(
    sent: list[list[int]], lag: int
) -> None:
    group: Any = None
    agreement = StopAgreement(group, lag)
    for _ in range(3):
        agreement.post(0)
    agreement.request(StopReason.TERMINATE)
    agreement.post(0)
    reasons = [agreement.at_boundary() for _ in range(lag + 1)]
    assert reasons == [StopReason.NONE] * lag + [StopReason.TERMINATE]
    assert len(sent) == 4 + lag

"""What one rank is asked for while others are asked for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dist.strategies.stop_agreement import StopAgreement, StopReason


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: work)


def test_a_reason_that_is_obeyed_hides_no_other() -> None:
    group: Any = None
    agreement = StopAgreement(group, lag=0)
    assert agreement.at_boundary() is StopReason.NONE
    agreement.request(StopReason.TERMINATE)
    agreement.request(StopReason.REQUEUE)
    assert agreement.at_boundary() is StopReason.REQUEUE
    agreement.go_on()
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
            agreement.go_on()
    assert [i for i, reason in enumerate(reasons) if reason] == [2, 6]

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.engine.precision.loss_scale import LossScale


@given(st.lists(st.booleans(), max_size=40))
def test_follows_torchs_scaler(overflows: list[bool]) -> None:
    ours = LossScale(2.0**4, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflowed in overflows:
        parameter.grad = torch.tensor(float("inf") if overflowed else 1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        ours.end_step(overflowed=overflowed)
        assert ours.value == max(scaler.get_scale(), 2.0**-24)
    assert (ours.num_steps, ours.num_skipped) == (len(overflows), sum(overflows))


def test_never_comes_to_zero() -> None:
    scale = LossScale(1.0)
    for _ in range(2000):
        scale.end_step(overflowed=True)
    assert scale.value == 2.0**-24


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_goes_on_where_it_was(is_dynamic: bool) -> None:
    first = LossScale(8.0, is_dynamic, growth_interval=2)
    for overflowed in (False, True, False):
        first.end_step(overflowed=overflowed)
    second = LossScale(8.0, is_dynamic, growth_interval=2)
    second.load_state_dict(first.state_dict())
    assert second == first
    second.end_step(overflowed=False)
    assert second.value == 8.0
    assert (second.num_steps, second.num_skipped) == (4, 1)

from __future__ import annotations

import pytest

from lightning_dist.engine.planning.devices import find_peak_flops
from lightning_dist.engine.profiling.exposure import length, outside, union
from lightning_dist.engine.profiling.meters.clock_sync import Ping, estimate_offset
from lightning_dist.engine.profiling.step_plan import Role, StepPlan


def test_the_quickest_ping_bounds_the_offset() -> None:
    # The other clock is 5 ahead. The second message took 0.1 there and 0.3 back.
    pings = [Ping(0.0, 5.9, 1.0), Ping(2.0, 7.1, 2.4), Ping(3.0, 8.9, 5.0)]
    offset = estimate_offset(pings)
    assert offset.seconds == pytest.approx(4.9)
    assert offset.uncertainty_seconds == pytest.approx(0.2)
    assert abs(offset.seconds - 5.0) <= offset.uncertainty_seconds


def test_intervals() -> None:
    ones, others = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (9.0, 9.0)], [(2.5, 5.5), (5.6, 5.7)]
    assert union(ones) == [(0.0, 3.0), (5.0, 6.0)]
    assert length(ones) == 4.0
    assert outside(ones, others) == [(0.0, 2.5), (5.5, 5.6), (5.7, 6.0)]


def test_roles_of_batches() -> None:
    plan = StepPlan(every_n_steps=5, active_steps=2, warmup_steps=3, num_counted=2)
    letters = "".join(plan.role(batch).value[0] for batch in range(16))
    assert letters == "nnncc" + "ettnn" * 2 + "e"
    assert [b for b in range(16) if plan.begins_timing(b)] == [6, 11]
    assert [b for b in range(16) if plan.ends_timing(b)] == [7, 12]
    assert plan.role(-1) is Role.NOTHING
    assert [plan.first_alike(batch) for batch in range(8)] == [0, 0, 0, 3, 3, 5, 6, 6]


def test_where_gradients_accumulate_an_optimizer_step_is_counted_and_examined() -> None:
    plan = StepPlan(every_n_steps=8, active_steps=2, warmup_steps=1, num_counted=3, num_examined=3)
    letters = "".join(plan.role(batch).value[0] for batch in range(20))
    assert letters == "n" + "ccc" + "eeettnnn" * 2
    assert [b for b in range(20) if plan.begins_timing(b)] == [7, 15]
    assert [b for b in range(20) if plan.ends_timing(b)] == [8, 16]
    with pytest.raises(ValueError, match="every_n_steps=4 at least 5: .* optimizer step, 3,"):
        StepPlan(every_n_steps=4, active_steps=2, warmup_steps=0, num_examined=3)


@pytest.mark.parametrize(("every", "active", "warmup"), [(2, 2, 0), (5, 0, 0), (5, 2, -1)])
def test_batches_that_do_not_fit(every: int, active: int, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"active_steps={active} .*warmup_steps={warmup} .*least"):
        StepPlan(every, active, warmup)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.4),
        ("NVIDIA H100 80GB HBM3", "32-true", 66.9),
        ("NVIDIA H100 PCIe", "16-mixed", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312.0),
        ("NVIDIA L4", "bf16-true", 121.0),
        ("NVIDIA L40S", "bf16-true", 362.0),
        ("NVIDIA H100 80GB HBM3", "64-true", None),
        ("NVIDIA Something 9", "bf16-true", None),
        ("cpu", "bf16-true", None),
    ],
)
def test_peaks(name: str, precision: str, teraflops: float | None) -> None:
    peak = find_peak_flops(name, precision)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))

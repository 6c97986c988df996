"""Peaks of known allocations, on the CPU."""

from __future__ import annotations

import torch
from torch.autograd.profiler import profile

from lightning_dist.engine.profiling.meters.peak import PeakMeter

KIB = 1024


def blocks(count: int) -> list[torch.Tensor]:
    return [torch.empty(KIB, dtype=torch.uint8) for _ in range(count)]


def test_peaks_between_marks() -> None:
    with PeakMeter(torch.device("cpu")) as meter:
        blocks(7)  # before the start
        meter.start("first")
        held = blocks(2)
        meter.mark(("second", 1))
        more = blocks(3)
        del more
        meter.mark("third")
        del held
        meter.mark("first")
        blocks(4)
        meter.mark(None)
        kept = blocks(9)
        meter.start("anew")
        del kept  # so there is less than at the start
        blocks(1)
    sizes = {"first": 4, ("second", 1): 5, "third": 2, "anew": 0}
    assert meter.peaks == {of: size * KIB for of, size in sizes.items()}


def test_what_a_backward_holds() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    weight.grad = torch.zeros(KIB)
    with PeakMeter(torch.device("cpu")) as meter:
        meter.start("step")
        weight.sin().sum().backward()
        meter.mark(None)
    # The sine, and while its gradient is made the sum's, which is a view, and the cosine.
    assert 2 * 4 * KIB <= meter.peaks["step"] <= 3 * 4 * KIB + 64


def test_another_profiler_goes_on() -> None:
    with profile(use_kineto=True) as outer, PeakMeter(torch.device("cpu")) as meter:
        meter.start("step")
        torch.ones(KIB).sin()
    assert meter.peaks == {}
    assert any(event.name == "aten::sin" for event in outer.function_events or ())

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.engine.planning.links import Link, fit_link

SIZES = [4**k for k in range(5, 14)]


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_a_link_is_found_again(latency: float, bandwidth: float) -> None:
    link = Link(latency, bandwidth)
    fit = fit_link(SIZES, [link.seconds(size) for size in SIZES])
    assert fit.link.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fit.link.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fit.residuals == pytest.approx([0.0] * len(SIZES), abs=1e-9)


def test_small_messages_count_as_much_as_large_ones() -> None:
    link = Link(1e-4, 1e9)
    seconds = [link.seconds(size) for size in SIZES]
    seconds[-1] *= 1.1  # ms, against the latency's 0.1 ms
    fit = fit_link(SIZES, seconds)
    assert fit.link.latency_seconds == pytest.approx(1e-4, rel=0.05)
    assert max(fit.residuals) == fit.residuals[-1] > 0.03


def test_nothing_is_negative() -> None:
    flat = fit_link([1, 1000, 2000], [3.0, 2.0, 1.0]).link
    assert flat.bytes_per_second == math.inf
    assert 1.0 < flat.latency_seconds < 3.0
    steep = fit_link([1000, 2000], [0.5, 2.0]).link
    assert steep.latency_seconds == 0.0
    assert 1000 < steep.bytes_per_second < 2000

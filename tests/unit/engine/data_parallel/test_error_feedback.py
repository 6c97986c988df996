"""Messages of 8-bit integers."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.engine.data_parallel.error_feedback import BLOCK, _quantised, _restored

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_is_off_by_half_a_step(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    values = (scale * torch.randn(500, BLOCK, dtype=torch.float64)).to(dtype)
    restored = _restored(_quantised(values), dtype).double()
    exact = values.double()
    step = exact.abs().amax(-1, keepdim=True) / 127
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((restored - exact).abs() <= step / 2 + rounding).all()


def test_the_smallest_numbers_keep_their_signs() -> None:
    values = torch.full((1, BLOCK), 2.6e-43)  # the scale is the smallest number there is
    assert (_restored(_quantised(values), torch.float32) > 0).all()


def test_a_block_that_is_not_finite_is_nan() -> None:
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = torch.inf
    restored = _restored(_quantised(values), torch.float32)
    assert restored[0, :BLOCK].isnan().all()
    assert torch.equal(restored[0, BLOCK:], torch.ones(BLOCK))

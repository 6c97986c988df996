from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.strategies.clipping import leaving_out, norm_over


def test_a_copy_that_another_rank_counts_is_left_out() -> None:
    own, copy = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    own.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0])
    norm = norm_over()
    assert float(norm([[own, copy]])) == pytest.approx((25 + 169) ** 0.5)
    assert float(leaving_out(lambda: [copy], norm)([[own, copy]])) == 5
    assert float(leaving_out(lambda: [copy], norm)([[own], [copy]])) == 5
    assert float(leaving_out(lambda: [own, copy], norm)([[own, copy]])) == 0

"""What a stage holds is what autograd would have added up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lightning_dist.pipeline.gradients import Lent


def test_a_sparse_gradient_and_a_dense_one() -> None:
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    tokens = torch.tensor([1, 3, 1])
    losses = [
        F.embedding(tokens, weight, sparse=True).square().sum(),
        weight.sin().sum(),
        F.embedding(tokens, weight, sparse=True).sum(),
    ]
    gradients = Lent()
    for loss in losses:
        assert gradients.run([loss], [torch.ones(())], [], {"weight": weight}, 0) == []
    assert weight.grad is None
    (expected,) = torch.autograd.grad(
        F.embedding(tokens, weight).square().sum()
        + weight.sin().sum()
        + F.embedding(tokens, weight).sum(),
        weight,
    )
    torch.testing.assert_close(gradients.take(0)["weight"], expected)

"""What a stage holds is what autograd would have added up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.pipeline.gradients import Lent
from lightning_dist.pipeline.parted_backward import PartedBackward


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


@pytest.mark.parametrize("is_parted", [False, True])
def test_a_hook_sees_the_sum_so_far_in_the_memory_that_is_held(is_parted: bool) -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    seen: list[tuple[list[float], int]] = []

    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append((parameter.grad.tolist(), parameter.grad.data_ptr()))

    weight.register_post_accumulate_grad_hook(look)
    gradients, own = Lent(), {"weight": weight}
    for value in (1.0, 10.0):
        x = torch.full((2,), value, requires_grad=True)
        loss = (x * weight).sum()
        if is_parted:
            parted = PartedBackward([loss], [torch.ones(())], [x], own)
            assert parted.run_inputs()[0] is not None
            with gradients.adding(own, 0):
                parted.run_weights()
        else:
            gradients.run([loss], [torch.ones(())], [x], own, 0)
        assert weight.grad is None
    held = gradients.take(0)["weight"]
    assert held.tolist() == [11.0, 11.0]
    assert seen == [([1.0, 1.0], held.data_ptr()), ([11.0, 11.0], held.data_ptr())]

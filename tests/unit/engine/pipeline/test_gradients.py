"""What a stage holds is what autograd would have added up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.fsdp_gradients import ParamGradAccumulator
from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.split_backward import SplitBackward
from lightning_dist.engine.stashing.versions import SwappedWeights, WeightVersion


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_sparse_gradient_and_a_dense_one(dtype: torch.dtype | None) -> None:
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    tokens = torch.tensor([1, 3, 1])
    losses = [
        F.embedding(tokens, weight, sparse=True).square().sum(),
        weight.sin().sum(),
        F.embedding(tokens, weight, sparse=True).sum(),
    ]
    gradients = HeldGradients(dtype)
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
    gradients, own = HeldGradients(), {"weight": weight}
    for value in (1.0, 10.0):
        x = torch.full((2,), value, requires_grad=True)
        loss = (x * weight).sum()
        if is_parted:
            parted = SplitBackward([loss], [torch.ones(())], [x], own)
            assert parted.run_inputs()[0] is not None
            with gradients.adding(own, parted.given, 0):
                parted.run_weights()
        else:
            gradients.run([loss], [torch.ones(())], [x], own, 0)
        assert weight.grad is None
    held = gradients.take(0)["weight"]
    assert held.tolist() == [11.0, 11.0]
    assert seen == [([1.0, 1.0], held.data_ptr()), ([11.0, 11.0], held.data_ptr())]


class Positions(nn.Module):
    """Its weight's gradient is a view of the output's, and so is its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[None]


@pytest.mark.parametrize("is_parted", [False, True])
@pytest.mark.parametrize("make", [lambda _: HeldGradients(), ParamGradAccumulator])
def test_what_was_sent_does_not_change_when_more_is_added(
    make: Callable[[nn.Module], HeldGradients], is_parted: bool
) -> None:
    module = Positions()
    own, gradients = dict(module.named_parameters()), make(module)
    handed: list[Tensor | None] = []
    gradients.begin_round(2)
    for value in (1.0, 10.0):
        x = torch.zeros(1, 2, 3, requires_grad=True)
        root, gradient = [module(x)], [torch.full((1, 2, 3), value)]
        if is_parted:
            with gradients.input_backward(own) as leaves:
                parted = SplitBackward(root, gradient, [x], leaves)
                handed += [*gradient, *parted.run_inputs()]
            with gradients.adding(own, parted.given, 0):
                parted.run_weights()
        else:
            handed += [*gradient, *gradients.run(root, gradient, [x], own, 0)]
    gradients.end_round()
    assert [float(t.mean()) for t in handed if t is not None] == [1.0, 1.0, 10.0, 10.0]
    assert gradients.take(0)["weight"].tolist() == [[11.0] * 3] * 2


def test_layers_that_are_lent_weights_meanwhile_keep_their_gradients() -> None:
    module = Positions()
    own, gradients = dict(module.named_parameters()), ParamGradAccumulator(module)
    version = WeightVersion(0, {"weight": module.weight.half()})
    backward = partial(SwappedWeights(module).backward, version)
    gradients.begin_round(1)
    output = module.weight.half() * 2.0
    gradients.run([output], [torch.ones_like(output)], [], own, 0, backward)
    gradients.end_round()
    assert gradients.take(0)["weight"].tolist() == [[2.0] * 3] * 2

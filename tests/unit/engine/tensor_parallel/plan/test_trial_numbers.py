"""What is proven with random numbers, in both modes, and with how many digits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.trial_run import (
    TrialNumbers,
    on_the_side,
    tolerance_of,
)
from lightning_dist.engine.tensor_parallel.plan.verify_sequence import check_positions
from tests.unit.engine.tensor_parallel.plan.test_verify import (
    TP,
    WIDTH,
    Attention,
    Mlp,
    by_head,
    model_of,
    plan_of,
    stacked,
)

Between = Callable[[nn.Module, Tensor], Tensor]


class Moody(Mlp):
    """``between`` knows the mode."""

    def __init__(self, between: Between) -> None:
        super().__init__(F.gelu)
        self.mixed = between

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.fc2(self.mixed(self, self.fc1(x)))
        return summed


def shuffled(h: Tensor) -> Tensor:
    return h[torch.randperm(len(h))]


CAN: dict[str, Between] = {
    "dropout": lambda m, h: F.dropout(h, 0.3, m.training),
    "noise in training": lambda m, h: h + 0.1 * torch.randn_like(h) if m.training else h,
    "a uniform draw": lambda m, h: h * torch.empty_like(h).uniform_(-1, 1).sigmoid(),
    "a permutation": lambda m, h: shuffled(h),
    "a decision": lambda m, h: h if torch.rand(()) < 0.3 else 2 * h,
    "fewer digits": lambda m, h: h.float().square().to(h.dtype),
    "half as many digits": lambda m, h: h.bfloat16().square().to(h.dtype),
}
CANNOT: dict[str, Between] = {
    "in training, with noise": lambda m, h: (
        h.softmax(-1) + 0.01 * torch.randn_like(h) if m.training else h
    ),
    "in training, with dropout": lambda m, h: (
        F.dropout(h.flip(-1), 0.3) if m.training else h.square()
    ),
    "in evaluation": lambda m, h: h if m.training else h.softmax(-1),
    "a little": lambda m, h: h + 1e-6 * h.mean(-1, keepdim=True),
    "some, with fewer digits": lambda m, h: (h + 0.01 * h.mean(-1, keepdim=True)).float().double(),
}


@pytest.mark.parametrize("name", CAN)
def test_random_numbers_and_fewer_digits_are_no_mismatch(name: str) -> None:
    assert plan_of(model_of(Moody(CAN[name]))) == {"1.fc1", "1.fc2"}


@pytest.mark.parametrize("name", CANNOT)
def test_what_does_not_add_up_in_one_mode_or_by_little_stays_whole(name: str) -> None:
    assert not plan_of(model_of(Moody(CANNOT[name])))


class Dropping(Attention):
    """Drops attention weights, and computes them in float32, whose type it may pass on."""

    def __init__(self, split: Callable[[Tensor, int], Tensor], *, returns: bool) -> None:
        super().__init__(split)
        self.returns = returns

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.qkv(x), self.num_heads)
        weights = (q @ k.transpose(-1, -2)).softmax(-1, dtype=torch.float32)
        weights = F.dropout(weights, 0.1, self.training)
        values = v if self.returns else v.float()
        summed: Tensor = self.out((weights.to(values.dtype) @ values).transpose(1, 2).flatten(2))
        return summed


@pytest.mark.parametrize("returns", [True, False])
def test_a_layer_that_knows_float32_only_is_tried_in_it(returns: bool) -> None:
    assert plan_of(model_of(Dropping(stacked, returns=returns))) == {"1.qkv", "1.out"}
    assert plan_of(model_of(Dropping(by_head, returns=returns))) == set()


class Shifting(Moody):
    """Looks at other positions while it draws."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + x.roll(1, 1) + 0 * torch.randn_like(x)
        return super().forward(x)


def test_blocks_that_look_at_other_positions_in_training_are_refused() -> None:
    styles = {"0.fc1": Style.COLWISE, "0.fc2": Style.ROWWISE}
    check_positions(nn.Sequential(Moody(CAN["dropout"])), ["0"], styles, TP)
    with pytest.raises(ValueError, match="something else with a part of it"):
        check_positions(nn.Sequential(Shifting(CAN["dropout"])), ["0"], styles, TP)


def test_draws_of_floats_are_constant_and_others_are_repeated() -> None:
    def drawn() -> list[Tensor]:
        with TrialNumbers():
            noise = [torch.randn(2), torch.empty(3).uniform_(), F.dropout(torch.ones(2), 0.5)]
            return [torch.cat(noise), torch.randperm(9)]

    outer = torch.get_rng_state()
    with on_the_side():
        (noise, order), again = drawn(), drawn()
    assert noise.tolist() == [0.5] * 5 + [1.0] * 2
    assert torch.equal(order, again[1])
    assert sorted(order.tolist()) == list(range(9))
    assert torch.equal(torch.get_rng_state(), outer)


def test_runs_that_differ_by_themselves_are_no_proof() -> None:
    numbers = iter(range(9))
    x = torch.ones(WIDTH, dtype=torch.float64)
    with on_the_side(), pytest.raises(ValueError, match="equal runs"):
        tolerance_of(lambda _: x * next(numbers), x.dtype)

"""Random numbers of a rank's own, and where they end."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.tensor_parallel.layers.rng import RegionRandomness

CPU = torch.device("cpu")


def test_a_region_has_numbers_of_its_own_and_leaves_the_others_as_they_were() -> None:
    drawn = []
    for index in range(2):
        torch.manual_seed(3)
        randomness = RegionRandomness(index, CPU)
        randomness.enter()
        randomness.enter()
        inside = torch.rand(4)
        randomness.leave()
        randomness.leave()
        drawn.append((inside, torch.rand(4)))
    (inside, outside), (other_inside, other_outside) = drawn
    assert not torch.equal(inside, other_inside)
    assert torch.equal(outside, other_outside)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_draws_the_same_though_it_stops_inside(use_reentrant: bool) -> None:
    randomness, masks = RegionRandomness(1, CPU), []

    def begin(x: torch.Tensor) -> torch.Tensor:
        randomness.enter()
        masks.append(torch.rand(3))
        return (x * masks[-1]).exp()

    torch.manual_seed(5)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        x = checkpoint(begin, x, use_reentrant=use_reentrant)
        randomness.leave()
    before = torch.get_rng_state()
    x.sum().backward()
    assert len(masks) == 6
    assert [m.tolist() for m in masks[3:]] == [m.tolist() for m in reversed(masks[:3])]
    randomness.leave()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_region_that_draws_nothing_leaves_the_state_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    randomness = RegionRandomness(1, torch.device("cpu"))
    for _ in range(2):
        randomness.enter()
        randomness.leave()
    assert torch.equal(torch.rand(3), expected)

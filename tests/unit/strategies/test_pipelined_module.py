from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.pipeline.ties import Tie
from lightning_dist.strategies.pipelined_module import refuse_places_outside, refuse_ties


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_layer_has_no_other_place_outside() -> None:
    holder = Holder()
    holder.same = holder.model  # it is cut with the other
    refuse_places_outside(holder, "model", holder.model)
    holder.head = holder.model[1]
    with pytest.raises(ValueError, match=r"'model.1.weight' is also 'head.weight'"):
        refuse_places_outside(holder, "model", holder.model)


def test_ties_are_refused_with_the_reason() -> None:
    refuse_ties((), "Never.")
    message = r"'0.w' \(stage 0\) and '2.w' \(stage 1\) are tied. Not here. Or put both layers"
    with pytest.raises(ValueError, match=message):
        refuse_ties((Tie({0: ("0.w",), 1: ("2.w",)}),), "Not here.")

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.layers import LayerSequence, layers_in


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


@pytest.mark.parametrize(
    "module", [Residual(nn.Linear(2, 2), nn.Linear(2, 2)), Branches()], ids=["subclass", "module"]
)
def test_children_of_a_module_with_a_forward_of_its_own_are_no_layers(module: Any) -> None:
    before = list(module.children())
    with pytest.raises(ValueError, match=r"find_split.*has a forward of its own"):
        Pipeline(module, PipelineShape("1f1b", 1, (1, 1), 0), Links({}, {}))
    assert list(module.children()) == before


def test_layers_are_returned_as_they_are() -> None:
    layers = layers_in(nn.Sequential(nn.Linear(2, 2)))
    assert isinstance(layers, LayerSequence)
    assert layers_in(layers) is layers

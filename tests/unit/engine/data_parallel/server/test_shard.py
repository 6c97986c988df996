"""The copies of parameters that a server steps on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_dist.engine.data_parallel.server.shard import ShardOptimizer


class ScaledSGD(torch.optim.SGD):
    """Reads a factor of the rate from each parameter, as muP does."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= getattr(parameter, "factor", 1.0) * parameter.grad


def test_an_optimizer_finds_the_attributes_of_parameters() -> None:
    plain, scaled = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scaled.factor = 0.5
    optimizer = ScaledSGD([plain, scaled], lr=1.0)
    shard = ShardOptimizer(optimizer)
    shard.follow(optimizer, [plain, scaled])
    shard.step([torch.ones(2), torch.ones(2)], [{"lr": 1.0}])
    assert [weight.tolist() for weight in shard.weights] == [[0.0, 0.0], [0.5, 0.5]]
    scaled.factor = 0.25  # by a hook, before the next epoch
    shard.follow(optimizer, [plain, scaled])
    shard.step([torch.ones(2), torch.ones(2)], [{"lr": 1.0}])
    assert shard.weights[1].tolist() == [0.75, 0.75]


def test_a_frozen_parameter_of_integers_is_followed() -> None:
    trained = nn.Parameter(torch.ones(2))
    table = nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = torch.optim.SGD([trained, table], lr=1.0)
    shard = ShardOptimizer(optimizer)
    shard.follow(optimizer, [trained, table])
    shard.step([torch.ones(2), None], [{"lr": 1.0}])
    assert [weight.tolist() for weight in shard.weights] == [[0.0, 0.0], [0, 1, 2]]

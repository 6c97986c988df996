"""Weights of another version, lent to layers that are known by several names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.engine.stashing.versions import SwappedWeights, WeightVersion


class Twice(nn.Module):
    """Has its layers under two names each, and a parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.body = nn.Sequential(self.norm, self.first)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.body(x))
        return result


def test_what_has_two_names_is_lent_once_and_given_back() -> None:
    layers, x = nn.Sequential(Twice()).eval(), torch.randn(3, 2)
    own = dict(layers.named_parameters(remove_duplicate=False))
    buffers = dict(layers.named_buffers(remove_duplicate=False))
    tensors = {**dict(layers.named_parameters()), **dict(layers.named_buffers())}
    aliases = {n: torch.full_like(t, 2.0) for n, t in tensors.items() if t.is_floating_point()}
    found = SwappedWeights(layers).run(WeightVersion(0, aliases), lambda: layers(x))
    normed = (x - 2.0) / (2.0 + 1e-5) ** 0.5 * 2.0 + 2.0
    hidden = normed.sum(1, keepdim=True).expand(3, 2) * 2.0 + 2.0
    torch.testing.assert_close(found, hidden.sum(1, keepdim=True).expand(3, 2) * 2.0 + 2.0)
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        assert parameter is own[name], name
    for name, buffer in layers.named_buffers(remove_duplicate=False):
        assert buffer is buffers[name], name

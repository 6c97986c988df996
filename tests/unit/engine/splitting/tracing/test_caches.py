"""A forward may keep a tensor that follows from the sizes of its inputs, and no other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing.sequence import TracedLayers


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        assert self.kept is not None
        return self.second(self.first(x) + self.kept.sum())

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError


class Positions(nn.Module):
    """A part that keeps a tensor for the first length, and slices it for others."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            table = torch.zeros(64, 4, dtype=x.dtype, device=x.device)
            table[:, 0::2] = torch.sin(torch.arange(64.0, dtype=x.dtype))[:, None]
            self.table = table
        return x + self.table[: x.shape[1]]


class Causal(nn.Module):
    """A transformer as in torch's examples, which makes a mask where the length has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        layer = nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != x.shape[1]:
            self.mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.encoder(self.positions(x), self.mask)
        out: Tensor = self.decoder(hidden, x, tgt_mask=self.mask)
        return out


def test_masks_of_torchs_transformers_and_tables_are_made_in_each_call() -> None:
    torch.manual_seed(0)
    module = Causal().double()
    whole = copy.deepcopy(module)
    TracedLayers(module, (torch.rand(3, 5, 4).double(),), {})
    hooks = [part._forward_pre_hooks for part in module.modules()]
    assert not any(hooks)
    for length in (5, 9, 3):
        x = torch.rand(2, length, 4, dtype=torch.float64)
        torch.testing.assert_close(module(x), whole(x), rtol=0, atol=1e-12)


class KeepsResult(Two):
    def keep(self, x: Tensor) -> None:
        self.kept = self.first(x)


class KeepsWeight(Two):
    def keep(self, x: Tensor) -> None:
        self.kept = self.first.weight * 2


class KeepsNoise(Two):
    def keep(self, x: Tensor) -> None:
        self.kept = torch.rand(x.shape[1])


class Fills(Two):
    """Makes a tensor, and writes into it what depends on the input."""

    def keep(self, x: Tensor) -> None:
        self.kept = torch.zeros(4)
        self.kept[0] = x.detach().sum()


class CountsInTensor(Two):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(1)

    def keep(self, x: Tensor) -> None:
        self.kept = self.kept + 1


class KeepsEntry(Two):
    def __init__(self) -> None:
        super().__init__()
        self.list: list[Tensor | None] = [None]

    def keep(self, x: Tensor) -> None:
        self.list[0] = self.kept = torch.ones(x.shape[1])


@pytest.mark.parametrize(
    "class_", [KeepsResult, KeepsWeight, KeepsNoise, Fills, CountsInTensor, KeepsEntry]
)
def test_no_other_tensor_may_be_kept(class_: type[Two]) -> None:
    with pytest.raises(ValueError, match=r"assigns self\.(kept|list).*a graph does not do"):
        TracedLayers(class_(), (torch.rand(3, 4),), {})

"""A trace of torch's transformers applies their masks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing.sequence import TracedLayers


class Causal(nn.Module):
    """A transformer with masks that torch compares with a causal one, unless it is told."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        layer = nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.decoder(self.encoder(x, mask), x, tgt_mask=mask)
        return out


def test_masks_of_torchs_transformers_are_not_compared() -> None:
    torch.manual_seed(0)
    module = Causal().double()
    whole = copy.deepcopy(module)
    TracedLayers(module, (torch.rand(3, 5, 4).double(),), {})
    hooks = [part._forward_pre_hooks for part in module.modules()]
    assert not any(hooks)
    for length in (5, 9, 3):
        x = torch.rand(2, length, 4, dtype=torch.float64)
        torch.testing.assert_close(module(x), whole(x), rtol=0, atol=1e-12)

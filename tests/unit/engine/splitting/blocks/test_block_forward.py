"""What the forward around the blocks does of its own accord."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dist.engine.splitting.blocks.find_blocks import blocks_of


def test_torchs_encoder_sends_padded_sequences_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2)
    x, is_padding = torch.randn(2, 5, 4, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    is_padding[:, -1] = True
    keywords = {"src_key_padding_mask": is_padding}
    expected = model(x, **keywords)
    model.eval()
    layers = blocks_of(model, "layers", "encoder")
    layers.attach(torch.device("cpu"))
    with torch.no_grad():
        sent = layers.stage(0, 1)(layers.layer_input(True, None, (x,), keywords))
        actual = layers.stage(1, 2)(layers.layer_input(False, sent, (x,), keywords))
    layers.detach()
    assert not sent.is_nested
    torch.testing.assert_close(actual[:, :-1], expected[:, :-1], rtol=0, atol=1e-12)
    assert model.use_nested_tensor

"""A small modern GPT as a sequence of layers, and its LightningModule.

Pre-norm blocks with RMSNorm, rotary positions (Su et al. 2021), causal attention, a squared-ReLU
MLP (So et al. 2021) and no biases. The model is an ``nn.Sequential``. A pipeline needs no more, and
the LightningModule has no code for one.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Embedding(nn.Module):
    """Bytes to vectors.

    Args:
        vocab_size: Different tokens.
        width: Size of the vectors.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ``(B, T)`` to ``(B, T, width)``."""
        embedded: Tensor = self.token(tokens)
        return embedded


class KeyValueCache:
    """Keys and values of the positions that one attention has seen, for ``(B, T)`` tokens.

    Args:
        num_positions: Most positions.

    Attributes:
        length: Positions so far.
    """

    def __init__(self, num_positions: int) -> None:
        self.length = 0
        self._num_positions = num_positions
        self._pair: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``(B, H, T, D)`` each, and returns those of all positions so far."""
        if self._pair is None:  # under tensor parallelism the heads are this rank's own
            batch, heads, _, size = keys.shape
            shape = (batch, heads, self._num_positions, size)
            self._pair = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        for held, new in zip(self._pair, (keys, values), strict=True):
            held[:, :, self.length : end] = new
        self.length = end
        held_keys, held_values = self._pair
        return held_keys[:, :, :end], held_values[:, :, :end]


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    Args:
        width: Size of the vectors.
        num_heads: Heads; must divide the width into even parts.

    Attributes:
        cache: The positions before those of the input, to which the input's are added; None for
            none, in training. An input behind others is one position long.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.cache: KeyValueCache | None = None
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, width)`` to the same shape."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, -1)  # (B, T, 3, H, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        past = 0 if self.cache is None else self.cache.length
        q, k = _rotate(q, past), _rotate(k, past)
        if self.cache is not None:
            k, v = self.cache.extend(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past == 0)
        merged: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged


def _rotate(x: Tensor, past: int, base: float = 10_000.0) -> Tensor:
    """Turns each pair of features by an angle that grows with the position; ``(B, H, T, D)``.

    ``past`` is the number of positions before the first.
    """
    length, size = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    positions = torch.arange(past, past + length, device=x.device)
    angles = positions[:, None] * frequencies  # (T, D / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """One transformer block.

    Args:
        width: Size of the vectors.
        num_heads: Attention heads.
        dropout: Probability, behind attention and MLP.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, width)`` to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.relu(self.up(self.mlp_norm(x))).square()))


class Head(nn.Module):
    """Vectors to logits.

    Args:
        width: Size of the vectors.
        vocab_size: Different tokens.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, T, width)`` to ``(B, T, vocab_size)``."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


def build_gpt(
    vocab_size: int = 256, width: int = 64, depth: int = 4, num_heads: int = 4, dropout: float = 0.0
) -> nn.Sequential:
    """Builds the model.

    Args:
        vocab_size: Different tokens; 256 for bytes.
        width: Size of the vectors.
        depth: Blocks.
        num_heads: Attention heads per block.
        dropout: Probability.

    Returns:
        Embedding, blocks and head; maps ``(B, T)`` integers to ``(B, T, vocab_size)`` logits.

    Raises:
        ValueError: The heads do not divide the width into even parts.
    """
    if width % (2 * num_heads):
        raise ValueError(
            f"width={width} must be a multiple of 2 * num_heads={2 * num_heads}: each head rotates"
            " pairs of features."
        )
    blocks = [Block(width, num_heads, dropout) for _ in range(depth)]
    return nn.Sequential(Embedding(vocab_size, width), *blocks, Head(width, vocab_size))


def warmup_and_decay(step: int, warmup_steps: int, total_steps: float) -> float:
    """Returns the share of the peak learning rate: linearly up, then linearly down to zero.

    Args:
        step: Number of steps taken.
        warmup_steps: Steps until the peak.
        total_steps: Steps of the whole run; infinity, for a run without an end, never decays.
    """
    up = (step + 1) / max(1, warmup_steps)
    if math.isinf(total_steps):
        return min(up, 1.0)
    return min(up, 1.0, max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps)))


class GPT(L.LightningModule):
    """Trains a byte-level GPT with AdamW, linear warm-up and linear decay.

    Args:
        width: Size of the vectors.
        depth: Blocks.
        num_heads: Attention heads per block.
        dropout: Probability.
        learning_rate: Peak learning rate.
        warmup_steps: Steps until the peak; 0 starts at the peak.
        weight_decay: Weight decay of matrices; norms have none.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 4e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_gpt(width=width, depth=depth, num_heads=num_heads, dropout=dropout)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Maps ``(B, T)`` bytes to ``(B, T, 256)`` logits of the next ones."""
        logits: Tensor = self.model(inputs)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_bits_per_byte", self._loss(batch) / math.log(2), sync_dist=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits = self(inputs)
        precise = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(precise), targets.flatten())

    @override
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.weight_decay,
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_and_decay(step, self.warmup_steps, total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

"""Attentions as people write them, all with the same heads, in a small GPT.

Each is named for where its forward is known from; nothing in it knows of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 4, 8, 24


class Fused(nn.Module):
    """Has one layer for queries, keys and values, and says its width and its heads."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.ones(1, 1, LENGTH, LENGTH).tril())


class NanoGPT(Fused):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class NanoGPTWithoutFlash(Fused):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MinGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(1, 1, LENGTH, LENGTH).tril())
        self.n_head = HEADS

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class ViT(nn.Module):
    """timm's; ``knows_size`` is how the newer ones are written."""

    def __init__(self, knows_size: bool = True) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if knows_size:
            self.head_dim = WIDTH // HEADS
            self.q_norm, self.k_norm = (nn.LayerNorm(self.head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        if hasattr(self, "head_dim"):
            qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Chunked(nn.Module):
    """lucidrains' without einops: a norm of its own, and an output layer in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        b, n, _ = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in qkv)
        out = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class Scratch(nn.Module):
    """Raschka's: the width stands in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = WIDTH, HEADS, WIDTH // HEADS
        for name in ("W_query", "W_key", "W_value"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, num_tokens, d_in = x.shape
        shape = (b, num_tokens, self.num_heads, self.head_dim)
        keys = self.W_key(x).view(shape).transpose(1, 2)
        queries = self.W_query(x).view(shape).transpose(1, 2)
        values = self.W_value(x).view(shape).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        context = (weights @ values).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, num_tokens, self.d_out))


class HeadSize(nn.Module):
    """Llama's, written with the size of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for p in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """nanoGPT's."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT: the head is the embedding, and the model gives its own loss."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        parts = {
            "wte": nn.Embedding(VOCABULARY, WIDTH),
            "wpe": nn.Embedding(LENGTH, WIDTH),
            "h": nn.ModuleList(Block(make()) for _ in range(depth)),
            "ln_f": nn.LayerNorm(WIDTH),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": NanoGPT,
    "nanoGPT without biases": lambda: NanoGPT(bias=False),
    "nanoGPT without flash attention": NanoGPTWithoutFlash,
    "minGPT": MinGPT,
    "ViT": ViT,
    "older ViT": lambda: ViT(knows_size=False),
    "chunked": Chunked,
    "from scratch": Scratch,
    "size of a head": HeadSize,
}

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.own_width import stand_in_source
from lightning_dist.engine.tensor_parallel.plan.heads import keep_own_heads

WIDTH, HEADS, TP = 8, 4, 2


class Attention(nn.Module):
    """Says its sizes in several ways, and gives what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.max_len, self.d_model = HEADS, WIDTH, WIDTH, WIDTH

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None, int]:
        batch, length, width = x.shape
        assert self.max_len == WIDTH
        assert width == self.n_embd
        return x, memory, width // self.n_head


class Blind(Attention):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x


def sharded(attention: nn.Module) -> nn.Module:
    keep_own_heads(attention, WIDTH, TP)
    return attention


def test_an_attention_that_asks_for_the_width_sees_that_of_its_own_heads() -> None:
    x = torch.randn(2, 3, WIDTH)
    seen, _, size_of_a_head = sharded(Attention()).forward(x)
    assert seen.shape == (2, 3, WIDTH // TP)
    assert size_of_a_head == WIDTH // HEADS
    assert stand_in_source(seen) is x


def test_whatever_else_is_computed_with_a_stand_in_is_no_number() -> None:
    seen, _, _ = sharded(Attention()).forward(torch.ones(1, 1, WIDTH))
    assert (seen * 0).isnan().all()


def test_only_what_the_input_is_itself_is_replaced() -> None:
    x, other = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    attention = sharded(Attention())
    seen, memory, _ = attention.forward(x, x)
    assert memory is seen
    assert attention.forward(x=x, memory=other)[1] is other


def test_attributes_that_are_not_read_or_of_another_kind_stay() -> None:
    attention = sharded(Attention())
    assert (attention.n_head, attention.n_embd) == (HEADS // TP, WIDTH // TP)
    assert (attention.max_len, attention.d_model) == (WIDTH, WIDTH)


def test_others_get_what_they_are_given() -> None:
    x = torch.randn(2, 3, WIDTH)
    assert sharded(Blind()).forward(x) is x

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_dist.engine.tensor_parallel.plan.heads import check_heads, keep_own_heads


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 8, 2, 16
        self.all_head_size = 128


def test_each_rank_counts_its_own_heads() -> None:
    attention = Grouped()
    keep_own_heads(attention, 128, 2)
    assert (attention.num_heads, attention.num_key_value_heads) == (4, 1)
    assert (attention.head_dim, attention.all_head_size) == (16, 64)


def test_heads_are_not_cut() -> None:
    check_heads("layers.0.attention", Grouped(), 2)
    with pytest.raises(ValueError, match=r"\[1, 2\].*num_key_value_heads=2 of 'a'.*tp_size=4"):
        check_heads("a", Grouped(), 4)


def test_a_config_counts_too() -> None:
    attention = nn.Module()
    attention.config = SimpleNamespace(num_attention_heads=6)
    with pytest.raises(ValueError, match="num_attention_heads=6"):
        check_heads("a", attention, 4)

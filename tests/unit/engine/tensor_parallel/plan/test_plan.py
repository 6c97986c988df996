from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.engine.tensor_parallel.apply import check_styles
from lightning_dist.engine.tensor_parallel.config import TensorConfig, resolve_plan
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.regions import Partners


class Attention(nn.Module):
    def __init__(self, width: int = 8, num_heads: int = 4, num_stacked: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, num_stacked * width)
        self.out = nn.Linear(width, width)


def model(**options: int) -> nn.Module:
    blocks = nn.ModuleList(Attention(**options) for _ in range(3))
    return nn.ModuleDict({"embedding": nn.Embedding(12, 8), "blocks": blocks})


PLAN = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}


def test_a_star_stands_for_the_number_of_a_layer() -> None:
    styles = resolve_plan(model(), PLAN)
    assert [(name, style.value) for name, style in styles.items()] == [
        (f"blocks.{i}.{name}", style)
        for i in range(3)
        for name, style in (("qkv", "colwise"), ("out", "rowwise"))
    ]


def test_a_later_pattern_counts_more() -> None:
    styles = resolve_plan(model(), {**PLAN, "blocks.1.*": "replicate"})
    assert styles["blocks.1.qkv"] is Style.REPLICATE
    assert styles["blocks.2.qkv"] is Style.COLWISE


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.qvk": "colwise"}, ["'blocks.*.qvk'", "Did you mean 'blocks.*.qkv'"]),
        ({"blocks.*.qkv": "colwyse"}, ["'colwyse'", "Did you mean 'colwise'", "'blocks.*.qkv'"]),
        ({"embedding": "rowwise"}, ["'embedding'", "'rowwise'", "nn.Linear", "Embedding"]),
        ({"blocks.*.qkv": "vocab"}, ["'blocks.0.qkv'", "nn.Embedding", "Linear"]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        resolve_plan(model(), plan)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("num_stacked", [1, 2, 3])
def test_the_partner_tells_how_many_matrices_are_stacked(num_stacked: int) -> None:
    network = model(num_stacked=num_stacked)
    assert Partners(resolve_plan(network, PLAN)).stacked_in(network, "blocks.1.qkv") == num_stacked


def test_matrices_of_different_sizes_are_refused() -> None:
    network = model()
    network.blocks[1].qkv = nn.Linear(8, 12)
    with pytest.raises(ValueError, match="12 output features of 'blocks.1.qkv'.*8 input features"):
        Partners(resolve_plan(network, PLAN)).stacked_in(network, "blocks.1.qkv")


@pytest.mark.parametrize(
    ("options", "plan", "size", "message"),
    [
        ({"num_heads": 2}, PLAN, 4, r"\[1, 2\].*num_heads=2 of 'blocks.0'.*tp_size=4"),
        ({}, {"embedding": "vocab"}, 5, "12 rows of 'embedding'.*tp_size=5.*pad them to 15"),
        ({}, {"blocks.*.out": "rowwise"}, 3, "8 input features of 'blocks.0.out'"),
        ({}, {"blocks.*.out": "colwise_gather"}, 3, "8 output features of 'blocks.0.out'"),
        ({}, {"blocks.0": "sequence"}, 2, "'sequence' of 'blocks.0' needs sequence_parallel=True"),
        ({}, {"blocks.*.out": "rowwise_scatter"}, 2, "needs sequence_parallel=True"),
    ],
)
def test_sizes_that_cannot_be_shared_out_are_refused(
    options: dict[str, int], plan: dict[str, str], size: int, message: str
) -> None:
    network = model(**options)
    with pytest.raises(ValueError, match=message):
        check_styles(network, resolve_plan(network, plan), size, sequence_parallel=False)


def test_a_plan_is_read_at_once() -> None:
    with pytest.raises(ValueError, match="plan='all'"):
        TensorConfig(plan="all")
    with pytest.raises(ValueError, match="'columns' of 'a'"):
        TensorConfig(plan={"a": "columns"})

"""The formulas are torch's, with those of a GPU's attention for a CPU's, and so are the sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from lightning_dist.engine.profiling.meters.step_counter import FlopCounter
from lightning_dist.engine.tensors.observers import OperationWatch

ROWS, WIDTH = 4, 8

ATEN = torch.ops.aten
GPU_FORMULAS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: (
        lambda *shapes, **_: sdpa_flop_count(*shapes[:3])
    ),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}


def attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def own_and_torchs(run: Callable[[], object]) -> tuple[int, int]:
    own = FlopCounter()
    with OperationWatch(own):
        run()
    with FlopCounterMode(display=False, custom_mapping=GPU_FORMULAS) as torchs:
        run()
    return own.flops, torchs.get_total_flops()


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(WIDTH, WIDTH),
        nn.Conv1d(ROWS, 3, 3),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
        nn.MultiheadAttention(WIDTH, 2),
        nn.Identity(),
    ],
)
@pytest.mark.parametrize("infers", [False, True])
def test_the_sum_is_torchs(module: nn.Module, infers: bool) -> None:
    x = torch.randn(2, ROWS, WIDTH, requires_grad=not infers)

    def run() -> None:
        with torch.inference_mode(infers):
            result = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
            result = attend(result) if isinstance(module, nn.Linear) else result
        if not infers:
            result.sum().backward()

    own, torchs = own_and_torchs(run)
    assert own == torchs
    assert (own > 0) is not isinstance(module, nn.Identity)


def test_attention_counts_on_a_cpu() -> None:
    own = FlopCounter()
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, 2, 7, 8, requires_grad=True) for _ in range(2))  # of two heads
    product = 2 * (2 * 4) * 5 * 7 * 8
    with OperationWatch(own):
        attend = nn.functional.scaled_dot_product_attention
        result = attend(query, key, value, is_causal=True, enable_gqa=True)
        assert own.flops == 2 * product
        result.sum().backward()
    assert own.flops == (2 + 5) * product


def test_formulas_that_users_add_count() -> None:
    with torch.library._scoped_library("lightning_dist_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        operation = torch.ops.lightning_dist_test.twice
        register_flop_formula(operation)(lambda shape, out_shape: 7 * shape.numel())
        own, torchs = own_and_torchs(lambda: operation(torch.ones(3)))
    assert own == torchs == 21

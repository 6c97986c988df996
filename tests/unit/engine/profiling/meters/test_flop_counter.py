"""The formulas are torch's, and so are the sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from lightning_dist.engine.profiling.meters.step_counter import FlopCounter
from lightning_dist.engine.tensors.observers import OperationWatch

ROWS, WIDTH = 4, 8


def attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def own_and_torchs(run: Callable[[], object]) -> tuple[int, int]:
    own = FlopCounter()
    with OperationWatch(own):
        run()
    with FlopCounterMode(display=False) as torchs:
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


def test_formulas_that_users_add_count() -> None:
    with torch.library._scoped_library("lightning_dist_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        operation = torch.ops.lightning_dist_test.twice
        register_flop_formula(operation)(lambda shape, out_shape: 7 * shape.numel())
        own, torchs = own_and_torchs(lambda: operation(torch.ones(3)))
    assert own == torchs == 21

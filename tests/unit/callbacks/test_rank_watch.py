from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision as LightningsMixedPrecision
from lightning.pytorch.plugins.precision import Precision

from lightning_dist.callbacks.rank_watch import computes_in
from lightning_dist.engine.planning.devices import find_peak_flops
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin


@pytest.mark.parametrize(
    ("plugin", "teraflops"),
    [
        (Precision(), 66.9),
        (LightningsMixedPrecision("bf16-mixed", "cpu"), 989.4),
        (HalfPrecisionPlugin(HalfPrecision(torch.bfloat16)), 989.4),
        (HalfPrecisionPlugin(HalfPrecision(torch.float16)), 989.4),
    ],
)
def test_a_peak_is_that_of_the_precision_in_force(plugin: Precision, teraflops: float) -> None:
    assert find_peak_flops("NVIDIA H200", computes_in(plugin)) == pytest.approx(teraflops * 1e12)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.precision.loss_scale import LossScale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "fp8"}, "compute='fp8' is unknown"),
        ({"keep_fp32": "norm"}, "keep_fp32='norm' must be a list"),
        ({"keep_fp32": [""]}, "none of them empty"),
        ({"keep_fp32": [1]}, "keep_fp32=.1. must be a list"),
        ({"keep_fp32": None}, "keep_fp32=None must be a list"),
        ({"loss_scale": "dynamic"}, "does not go with compute='bf16'"),
        ({"loss_scale": 8.0}, "does not go with compute='bf16'"),
        ({"compute": "fp16", "loss_scale": "static"}, "loss_scale='static' is unknown"),
        ({"compute": "fp16", "loss_scale": 0.0}, "loss_scale=0.0 must be a number"),
        (
            {"compute": "fp16", "loss_scale": float("nan")},
            "loss_scale=nan must be a number",
        ),
        (
            {"compute": "fp16", "loss_scale": float("inf")},
            "loss_scale=inf must be a number",
        ),
        ({"initial_scale": 0.0}, "initial_scale=0.0 must be a number"),
        ({"initial_scale": float("inf")}, "initial_scale=inf must be a number"),
        ({"initial_scale": float("nan")}, "initial_scale=nan must be a number"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"log_layers_every_n_steps": 0}, "log_layers_every_n_steps=0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**arguments)


def test_the_scale_is_in_checkpoints_that_are_saved_after_a_run_too() -> None:
    first, second, unscaled = MixedPrecision("fp16"), MixedPrecision("fp16"), MixedPrecision()
    assert first.loss_scale is not None
    first.loss_scale.end_step(overflowed=True)
    second.load_state_dict(first.state_dict())
    assert second.loss_scale == first.loss_scale
    assert unscaled.state_dict() == {}
    unscaled.load_state_dict(first.state_dict())


def test_a_step_before_a_load_does_not_count_behind_it() -> None:
    callback = MixedPrecision("fp16")
    trainer: Any = SimpleNamespace(strategy=SingleDeviceStrategy())
    callback.setup(trainer, L.LightningModule(), "fit")
    saved = callback.state_dict()
    trainer.strategy.precision_plugin.overflow.decide([torch.tensor(float("inf"))])
    callback.load_state_dict(saved)
    assert callback.state_dict() == saved


def test_scales() -> None:
    assert MixedPrecision().loss_scale is None
    assert MixedPrecision("fp16", loss_scale=None).loss_scale is None
    assert MixedPrecision("fp16").loss_scale == LossScale(2.0**16, growth_interval=2000)
    assert MixedPrecision("fp16", loss_scale=8.0).loss_scale == LossScale(8.0, is_dynamic=False)

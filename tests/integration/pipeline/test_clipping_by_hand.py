"""Hooks that clip with torch's function clip by the norm over all stages, as on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightning_dist import MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class ClipsByHand(Classifier):
    """Clips by torch's function, in one of the hooks that may change gradients."""

    def __init__(self, hook: str, norm_type: float) -> None:
        super().__init__()
        self.hook, self.norm_type = hook, norm_type
        self.norms: list[float] = []

    def _clip(self, hook: str) -> None:
        if self.hook == hook:
            self.norms.append(float(clip_grad_norm_(self.parameters(), 0.2, self.norm_type)))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self._clip("configure_gradient_clipping")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._clip("on_before_optimizer_step")

    def on_after_backward(self) -> None:
        self._clip("on_after_backward")


def clip_by_hand(
    name: str, hook: str, norm_type: float, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    strategies: dict[str, Any] = {
        "one": "auto",
        "stages": PipelineStrategy(),
        "sharded": MeshStrategy(pp=2, dp_shard=2),
    }
    devices = {"one": 1, "stages": 2, "sharded": 4}[name]
    trainer = make_trainer(devices=devices, strategy=strategies[name], max_epochs=2, **options)
    module = make_module(ClipsByHand, hook=hook, norm_type=norm_type)
    trainer.fit(module, make_loader(16), make_loader(8))
    return module.norms, state_of(module)


class ClipsInParts(ClipsByHand):
    def _clip(self, hook: str) -> None:
        if self.hook == hook:
            own = [p for p in self.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(p.grad for p in own)
            torch.nn.utils.clip_grads_with_norm_(own, 0.2, norm)
            self.norms.append(float(norm))


def clip_in_parts(devices: int) -> tuple[list[float], dict[str, Tensor]]:
    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy)
    module = make_module(ClipsInParts, hook="on_after_backward", norm_type=2.0)
    trainer.fit(module, make_loader(16), make_loader(8))
    return module.norms, state_of(module)


def test_torchs_total_norm_is_that_of_all_stages(workers: WorkerPool) -> None:
    ((norms, expected),) = workers.run(1, clip_in_parts, 1)
    for own_norms, state in workers.run(2, clip_in_parts, 2):
        assert own_norms == pytest.approx(norms, rel=1e-9)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)


@pytest.mark.some("after-inf-stages", "configure-2.0-stages")
@pytest.mark.parametrize("name", ["stages", "sharded"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(
    "hook",
    ["configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward"],
    ids=["configure", "before", "after"],
)
def test_users_clip_by_the_norm_over_all_stages(
    workers: WorkerPool, hook: str, norm_type: float, name: str
) -> None:
    ((norms, expected),) = workers.run(1, clip_by_hand, "one", hook, norm_type)
    assert min(norms) > 0.2 if norm_type == 2.0 else min(norms) > 0.0
    for own_norms, state in workers.run(
        2 if name == "stages" else 4, clip_by_hand, name, hook, norm_type
    ):
        assert own_norms == pytest.approx(norms, rel=1e-9)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)

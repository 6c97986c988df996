"""Runs of synchronous schedules do not notice that layers move."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from lightning_dist.strategies.base.saving.part_warning import without_warning
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.networks.traced_models import ResNet, Task, make_images
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.rebalance.moving_common import (
    ToAndFro,
)


class Body(nn.Module):
    """Keeps its own forward, and has parts before and behind its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(ConvLayer() for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden).flatten(1)


class OfBlocks(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.model = Body()


# What is trained, by which strategy and trainer, on what.
TO_AND_FRO: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Any]] = {
    "gradients that wait": (Classifier, {}, {"accumulate_grad_batches": 2}, make_loader),
    "blocks": (OfBlocks, {"layers": "model.blocks"}, {}, make_loader),
    "traced": (partial(Task, ResNet), {"layers": "trace", "num_microbatches": 1}, {}, make_images),
}


def go_to_and_fro(name: str, *, moves: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    module, strategy, options, loader = TO_AND_FRO[name]
    made = make_module(module)
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(partition="uniform", **strategy),
        callbacks=[ToAndFro()] if moves else [],
        **options,
    )
    trainer.fit(made, loader(), loader(8))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(made, loader(8), verbose=False)
    with without_warning(made):
        return dict(made.state_dict()), {**metrics, **validated}


def run_both(name: str) -> Any:
    return go_to_and_fro(name, moves=True), go_to_and_fro(name, moves=False)


@pytest.mark.some("gradients that wait")
@pytest.mark.parametrize("name", TO_AND_FRO)
def test_a_synchronous_run_does_not_notice(workers: WorkerPool, name: str) -> None:
    moved: dict[str, Tensor] = {}
    stayed: dict[str, Tensor] = {}
    for (left, left_metrics), (right, right_metrics) in workers.run(2, run_both, name):
        moved |= left
        stayed |= right
        assert left_metrics == right_metrics
        assert left.keys() != right.keys()
    assert moved.keys() == stayed.keys()
    for key, value in moved.items():
        assert torch.equal(value, stayed[key]), key

"""Update rules that the package does not have, under Lightning: nothing else has to know them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.schedules.family import ScheduleFamily
from tests.helpers.networks.models import make_loader, make_module, make_optimizer
from tests.helpers.oracle import train_late
from tests.helpers.processes.workers import WorkerPool
from tests.helpers.update_rules import PER_BATCH, TRIPLE, add_families
from tests.integration.pipeline.common import (
    EPOCHS,
    LR_DECAY,
    SIZES,
    Fitted,
    fit,
    largest_difference,
)

NUM_STAGES, LAYERS_PER_STAGE, CLIP = 4, 2, 0.05


def fit_with(schedule: str, count: int, trainer: dict[str, Any]) -> Fitted:
    with pytest.MonkeyPatch.context() as patch:
        add_families(patch)
        strategy = {"schedule": schedule, "num_microbatches": count}
        return fit(NUM_STAGES, strategy, {"schedule_lr": True}, trainer)


def oracle(family: ScheduleFamily, count: int, clips: bool) -> dict[str, Tensor]:
    model = make_module().model
    optimizer = make_optimizer("sgd", model.parameters())
    base = optimizer.param_groups[0]["lr"]

    def staleness(name: str) -> int:
        stage = int(name.split(".")[0]) // LAYERS_PER_STAGE
        return family.update_rule.delay(stage, NUM_STAGES, count)

    def before_step(b: int) -> None:
        optimizer.param_groups[0]["lr"] = base * LR_DECAY**b
        if clips:
            assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP

    batches = [batch for _ in range(EPOCHS) for batch in make_loader()]
    drains = range(0, len(batches), len(SIZES))
    train_late(model, optimizer, batches, F.cross_entropy, drains, before_step, staleness)
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.some("together, *")
@pytest.mark.parametrize(
    ("family", "count", "clips"),
    [(TRIPLE, 2, True), (PER_BATCH, 2, False)],
    ids=["together, clipped by the whole norm", "each stage by itself"],
)
def test_trains_as_the_rule_says(
    workers: WorkerPool, family: ScheduleFamily, count: int, clips: bool
) -> None:
    trainer = {"gradient_clip_val": CLIP} if clips else {}
    actual = workers.run(NUM_STAGES, fit_with, family.name, count, trainer)
    assert largest_difference(actual, oracle(family, count, clips)) < 1e-12

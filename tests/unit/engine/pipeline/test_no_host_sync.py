"""A step of a pipeline reads no value of a device, so the host never waits for the device.

Tensors on the meta device have no values: whatever reads one raises.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.engine.parallelize.clip_grad import clip_grad_norm_
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES, find_family
from tests.helpers.processes.threads import run_ranks, shapes_of

META = torch.device("meta")


def make() -> nn.Sequential:
    with META:
        parts = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*parts)


def train(model: nn.Sequential, pipeline: Pipeline) -> int:
    """Trains some batches and drains; returns the number of updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    batch = torch.empty(6, 4, device=META)
    updates = 0

    def update() -> None:
        nonlocal updates
        optimizer.zero_grad()
        pipeline.install_gradients()
        with pipeline.updating():
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        updates += 1

    for _ in range(4):
        pipeline.train_batch(batch, lambda m: model(m.content).square().mean())
        if pipeline.has_gradients:
            update()
    for _ in pipeline.drain():
        update()
    return updates


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_step_reads_no_value_of_the_device(schedule: str) -> None:
    family = find_family(schedule)
    layers = (1,) * 4 if family.fewest_stages == 2 else (2, 2)
    count = 2 if family.update_rule.splits_batches else 1
    shapes = shapes_of(schedule, count, layers)
    assert run_ranks(make, shapes, train, device=META) == [4, 4]


def test_a_read_would_be_found() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        float(torch.empty((), device=META))

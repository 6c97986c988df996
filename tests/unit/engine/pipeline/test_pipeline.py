from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape

BATCH = torch.ones(4, 2)


def make(schedule: str) -> tuple[Pipeline, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    links = connect_in_memory(range(1))[0]

    def step(microbatch: Any) -> Tensor:
        return model(microbatch.content).square().mean()

    return Pipeline(model, PipelineShape(schedule, 1, (2,), 0), links), step


def take(pipeline: Pipeline) -> None:
    pipeline.install_gradients()
    with pipeline.updating():
        pass


def test_an_asynchronous_update_that_is_left_out_is_an_error() -> None:
    pipeline, step = make("pipedream_2bw")
    for _ in range(3):
        pipeline.train_batch(BATCH, step)
        if pipeline.has_gradients:
            take(pipeline)
    drain = pipeline.drain()
    next(drain)
    with pytest.raises(ValueError, match="the update of batch 2 was not taken"):
        next(drain)
    with pytest.raises(ValueError, match="the update of batch 2 was not taken"):
        pipeline.train_batch(BATCH, step)
    take(pipeline)


def test_a_synchronous_update_may_take_several_batches() -> None:
    pipeline, step = make("1f1b")
    for _ in range(2):
        pipeline.train_batch(BATCH, step)
    take(pipeline)
    assert list(pipeline.drain()) == []

"""Pipelines of two ranks in this process, threads that take turns: the engine without messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape, find_family
from tests.gpu.setting import Setting
from tests.helpers.networks.models import make_data, make_layers
from tests.helpers.processes.threads import shapes_of

LAYERS = {1: (4, 4), 2: (2, 2, 2, 2)}
"""Of :func:`make_layers`, for one or two stages on each of two ranks."""
NUM_MICROBATCHES, BATCH_SIZE, NUM_BATCHES = 4, 8, 8

Batch = tuple[Tensor, Tensor]


def shapes(schedule: str) -> list[PipelineShape]:
    """Returns both ranks of a schedule."""
    per_rank = len(find_family(schedule).rank_of_stage(2)) // 2
    count = {"pipedream": 1, "pipedream_2bw": 2}.get(schedule, NUM_MICROBATCHES)
    return shapes_of(schedule, count, LAYERS[per_rank])


def make_model(setting: Setting) -> nn.Sequential:
    torch.manual_seed(7)
    return make_layers().double().to(setting.torch_device)


def batches(setting: Setting) -> list[Batch]:
    x, y = (part.to(setting.torch_device) for part in make_data(NUM_BATCHES * BATCH_SIZE).tensors)
    return list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))


def step_of(net: nn.Module) -> Callable[[Any], Tensor]:
    """Returns the step of a micro-batch."""

    def step(microbatch: Any) -> Tensor:
        x, y = microbatch.content
        return F.cross_entropy(net(x), y)

    return step


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def update(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Applies the gradients that a pipeline holds."""
    optimizer.zero_grad()
    pipeline.install_gradients()
    with pipeline.updating():
        optimizer.step()

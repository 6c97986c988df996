from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.config import (
    PipelineConfig,
    find_batch_statistics,
    with_whole_batches,
)
from lightning_dist.strategies.pipelining.start_line import (
    StartLine,
    describe_pipeline,
    explain_own_statistics,
    explain_statistics,
)


@pytest.mark.parametrize(
    ("schedule", "count", "sizes", "line"),
    [
        (
            "1f1b",
            8,
            (4, 4, 3),
            "Pipeline of 3 stages on 3 ranks, 1+2+1 layers of net (the blocks of h),"
            " schedule '1f1b', 3 micro-batches of 3 or 4 samples, 2 data replicas.",
        ),
        (
            "pipedream",
            1,
            (9,),
            "Pipeline of 3 stages on 3 ranks, 1+2+1 layers of net (the blocks of h),"
            " schedule 'pipedream', 1 micro-batch of 9 samples, 3+2+1 versions of the weights,"
            " 2 data replicas.",
        ),
    ],
)
def test_one_line_says_how_a_pipeline_was_cut(
    schedule: str, count: int, sizes: tuple[int, ...], line: str
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    links = connect_in_memory(range(3))[0]
    pipeline = Pipeline(model, PipelineShape(schedule, count, (1, 2, 1), 0), links)
    mesh = MeshShape(pp=3, dp_replicate=2)
    assert describe_pipeline(pipeline, mesh, "net (the blocks of h)", sizes) == line
    pipeline.detach()


def test_a_first_batch_may_have_samples_of_different_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    links = connect_in_memory(range(2))[0]
    pipeline = Pipeline(model, PipelineShape("1f1b", 2, (1, 1), 0), links)
    line = StartLine(pipeline, MeshShape(pp=2), "net", [], are_synced=False)
    trainer: Any = SimpleNamespace(train_dataloader=DataLoader([0], 4, collate_fn=list))  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        line.on_train_batch_start(trainer, L.LightningModule(), [*map(torch.ones, (5, 3, 4, 4))])
    pipeline.detach()
    assert "2 micro-batches of 2 samples" in caplog.text


def test_modules_with_batch_statistics_are_found() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2), nn.BatchNorm2d(2).eval())
    assert find_batch_statistics(net) == ("0 (BatchNorm1d)",)


@pytest.mark.parametrize(
    ("schedule", "asked", "num_ranks", "count"),
    [
        ("1f1b", "auto", 4, 1),
        ("zbv", "auto", 2, 1),
        ("1f1b", 6, 4, 6),
        ("pipedream_2bw", "auto", 4, "auto"),  # it needs three
        ("pipedream_2bw", "auto", 2, 1),
    ],
)
def test_batches_stay_whole_where_they_can(
    schedule: str, asked: int, num_ranks: int, count: int
) -> None:
    config = PipelineConfig(schedule, num_microbatches=asked)
    assert with_whole_batches(config, num_ranks).num_microbatches == count


def test_the_cost_of_whole_batches_and_the_change_by_others_are_told() -> None:
    whole = explain_statistics(["a (BatchNorm1d)"], (32,), 4)
    assert "a (BatchNorm1d): statistics of the batch are kept" in whole
    assert "75% of the time" in whole
    assert "num_microbatches=16" in whole
    cut = explain_statistics(["a (BatchNorm1d)"], (8, 8, 8, 8), 4)
    assert "micro-batches of 8 samples, where one device has 32" in cut


def test_own_statistics_are_explained() -> None:
    assert "sync_batchnorm=True" in explain_own_statistics(["net.1 (BatchNorm1d)"])

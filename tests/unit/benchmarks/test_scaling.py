"""What ranks send and hold, on paper: closed forms, and the dry run's own count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dist import MeshStrategy
from lightning_dist.engine.planning.traffic import MessageKind, Traffic
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.benchmarks.scaling import paper
from tests.benchmarks.scaling.growth import growth
from tests.benchmarks.scaling.layouts import LAYERS, LAYOUTS, MESH, Layout

SIZES = paper.Sizes(layer_bytes=4096, row_bytes=64, rows=128)
FEW = replace(SIZES, rows=8)
"""For a dry run, which runs each micro-batch."""
NUMBERS = (4, 8, 16, 32, 64)


def messages(name: str, num_ranks: int, rank: int) -> int:
    traffic = paper.traffic_of(LAYOUTS[name], num_ranks, rank, SIZES)
    return paper.num_messages(traffic, LAYOUTS[name], num_ranks)


def num_bytes(name: str, num_ranks: int, rank: int) -> int:
    traffic = paper.traffic_of(LAYOUTS[name], num_ranks, rank, SIZES)
    return paper.num_bytes(traffic, LAYOUTS[name], num_ranks)


@pytest.mark.parametrize("n", NUMBERS)
def test_what_a_rank_of_a_chain_sends_does_not_depend_on_the_stages(n: int) -> None:
    both_ways, batch = 2 * SIZES.rows, 1
    for name, laps in (("1f1b", 1), ("pipedream_2bw", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        middle = n // 2
        assert messages(name, n, middle) == laps * both_ways + batch
        activations = laps * both_ways * SIZES.row_bytes
        assert num_bytes(name, n, middle) == activations + SIZES.rows * SIZES.row_bytes
    assert messages("pipedream", n, n // 2) == 2 + batch


@pytest.mark.parametrize("n", NUMBERS)
def test_the_last_rank_sends_its_results_to_each_other_one(n: int) -> None:
    assert messages("1f1b", n, n - 1) == SIZES.rows + (n - 1)
    # The last stage is on rank 0. Its two stages end at rank 1, which they send to and receive
    # from: an activation and a gradient of each micro-batch.
    assert messages("zbv", n, 0) == 2 * SIZES.rows + 1 + (n - 1)
    assert messages("zbv", n, n - 1) == 2 * SIZES.rows  # what turns there stays in its memory


@pytest.mark.parametrize("n", NUMBERS)
def test_rings_send_more_messages_and_hardly_more_bytes(n: int) -> None:
    whole = LAYERS * SIZES.layer_bytes
    assert messages("DDP", n, 0) == 2 * (n - 1)
    assert num_bytes("DDP", n, 0) == 2 * whole * (n - 1) // n
    assert messages("FSDP", n, 0) == 3 * LAYERS * (n - 1)
    assert num_bytes("FSDP", n, 0) == 3 * whole * (n - 1) // n


@pytest.mark.parametrize("n", NUMBERS)
def test_a_mesh_sends_what_its_axes_do(n: int) -> None:
    shape = MESH.mesh(n)
    assert shape.world_size == n
    first = messages("1f1b", shape.pp, 0)
    assert messages(MESH.name, n, 0) == first + 2 * (shape.dp_replicate - 1)


@pytest.mark.parametrize("n", NUMBERS)
def test_memory_grows_with_what_is_in_flight(n: int) -> None:
    def memory(name: str, rank: int) -> int:
        return paper.memory_of(LAYOUTS[name], n, rank, SIZES)

    stage, activation = LAYERS * SIZES.layer_bytes, LAYERS * SIZES.row_bytes
    assert memory("1f1b", 0) == 2 * stage + n * activation
    assert memory("1f1b", n - 1) == 2 * stage + activation
    of_batch = SIZES.rows * activation
    assert memory("pipedream", 0) == (2 + n - 1) * stage + n * of_batch
    assert memory("pipedream_2bw", 0) == 3 * stage + n * activation
    assert memory("DDP", 0) == 2 * stage + of_batch


def test_growth_names_the_curve() -> None:
    sizes = (2, 4, 8, 16)
    curves: dict[str, list[float]] = {
        "constant": [100.0, 101.0, 99.0, 100.0],
        "bounded": [1 - 1 / n for n in sizes],
        "falling": [5 + 64 / n for n in sizes],
        "logarithmic": [3.0, 5.0, 7.0, 9.0],
        "linear, 9 per rank": [7 + 9.0 * n for n in sizes],
        "quadratic": [1000 + 2.0 * n * n for n in sizes],
    }
    assert {name: growth(sizes, values) for name, values in curves.items()} == {
        name: name for name in curves
    }


def test_of_noisy_values_the_slowest_curve_counts() -> None:
    sizes, times = (2, 4, 8, 16), [110.0, 99.0, 100.0, 117.0]
    assert growth(sizes, times) == "quadratic"
    assert growth(sizes, times, noise=0.15) == "constant"
    assert growth(sizes, [0.3, 0.6, 1.4, 2.9], noise=0.15) == "linear, 0.188 per rank"


class Rows(L.LightningModule):
    """Layers whose parameters and outputs have the sizes of the paper's."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        width = SIZES.row_bytes // 4
        rows = SIZES.layer_bytes // SIZES.row_bytes
        self.model = nn.Sequential(*(Table(rows, width) for _ in range(num_layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).mean()
        return loss


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.sum(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {"pp": 4, "dp_shard": 1}),
        ("zbv", {"pp": 4, "dp_shard": 1}),
        ("FSDP", {"dp_shard": 4}),
        (MESH.name, {"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
    ],
)
def test_a_dry_run_counts_the_same(name: str, options: dict[str, Any]) -> None:
    layout = LAYOUTS[name]
    pipeline = PipelineConfig(schedule=layout.schedule or "1f1b", num_microbatches=FEW.rows)
    module = Rows(LAYERS * layout.num_stages(4))
    sample = torch.zeros(FEW.rows, FEW.row_bytes // 4)
    said = MeshStrategy(pipeline=pipeline, **options).dry_run(module, 4, sample_batch=sample)
    for rank in range(4):
        ours = _bytes_of(paper.traffic_of(layout, 4, rank, FEW))
        theirs = _bytes_of(said.kind_of(rank).traffic)
        assert theirs == _without_batches_and_results(ours, layout, rank)


def _bytes_of(traffic: tuple[Traffic, ...]) -> dict[Any, int]:
    return {(each.kind, each.axes): each.num_bytes for each in traffic}


def _without_batches_and_results(sent: dict[Any, int], layout: Layout, rank: int) -> dict[Any, int]:
    """A dry run reads no batches, and logs nothing."""
    if not layout.schedule:
        return sent
    shape = layout.shape(4, FEW.rows, rank)
    batch = FEW.rows * FEW.row_bytes if shape.rank + 1 < shape.num_ranks else 0
    results = 8 * (shape.num_ranks - 1) if shape.rank == shape.rank_of_stage[-1] else 0
    of_stages = MessageKind.SEND, ("pp",)
    return {**sent, of_stages: sent[of_stages] - batch - results}

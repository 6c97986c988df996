"""docs/mesh.md says what goes with what: for each "yes" there is a case, each "refused" is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_dist import MeshStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.schedules.registry import find_family
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.integration.conformance.strategies import ENTRIES
from tests.integration.mesh.cases import CASES
from tests.integration.pipeline.parity import test_one_batch_late, test_oracle, test_parity
from tests.integration.tensor import test_strategy

PAGE = Path(__file__).parents[3] / "docs" / "mesh.md"


@dataclass(frozen=True)
class Tried:
    """What some test compares with a single device, or with its oracle.

    Attributes:
        strategy: Name of its class.
        mesh: Its sizes.
        dials: Other arguments, those of the configurations too.
    """

    strategy: str
    mesh: MeshShape
    dials: dict[str, Any]

    @property
    def schedule(self) -> str:
        return str(self.dials.get("schedule", "1f1b")) if self.mesh.pp > 1 else ""


def tried() -> Iterator[Tried]:
    for case in CASES.values():
        dials = {"schedule": case.schedule, **case.tensor, **case.shard}
        yield Tried("MeshStrategy", case.strategy.mesh_shape(case.devices), dials)
    for entry in ENTRIES.values():
        strategy, dials = entry.make(), getattr(entry.make, "keywords", {})
        yield Tried(type(strategy).__name__, strategy.mesh_shape(entry.devices), dials)
    for devices, tp_size, dials in test_strategy.CASES.values():
        mesh = TensorParallelStrategy(tp_size).mesh_shape(devices)
        yield Tried("TensorParallelStrategy", mesh, dials)
    assert test_oracle.test_two_replicas_of_two_stages_equal_the_oracle
    assert test_one_batch_late.test_two_replicas_of_two_stages_equal_the_oracle
    for schedule in (*test_parity.SYNCHRONOUS, "pipedream", "pipedream_2bw"):
        num_stages = len(find_family(schedule).rank_of_stage(2))
        pipeline = PipelineStrategy(schedule=schedule, num_stages=num_stages)
        yield Tried("PipelineStrategy", pipeline.mesh_shape(4), {"schedule": schedule})


SCHEDULES = {
    "stages, `gpipe`, `1f1b`, `interleaved_1f1b`, `looped_bfs`, `zb_h1` and `zbv`": "",
    "stages, `pipedream` and `pipedream_2bw`": "would have to be sharded and gathered by itself",
}
"""Rows with stages, and why MeshStrategy refuses them."""


def of_row(row: str) -> Callable[[Tried], bool]:
    return lambda t: t.schedule in re.findall(r"`(\w+)`", row)


ROWS: dict[str, Callable[[Tried], bool]] = {
    **{row: of_row(row) for row in SCHEDULES},
    "replicas": lambda t: t.mesh.dp_replicate > 1,
    "shards": lambda t: t.mesh.dp_shard > 1,
    "tensor parallel": lambda t: t.mesh.tp > 1,
}
COLUMNS: dict[str, Callable[[Tried], bool]] = {
    "replicas": ROWS["replicas"],
    "shards": ROWS["shards"],
    "tensor parallel": ROWS["tensor parallel"],
    "sequence, loss parallel": lambda t: all(
        t.mesh.tp > 1 and t.dials.get(dial) for dial in ("sequence_parallel", "loss_parallel")
    ),
    "recomputation": lambda t: t.dials.get("activation_checkpointing", "none") != "none",
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "shards": {"dp_shard": 2},
    "tensor parallel": {"tp": 2},
    "sequence, loss parallel": {"tp": 2, "tensor": TensorConfig("auto", True, True)},
    "recomputation": {"shard": ShardConfig(activation_checkpointing="full")},
}


def cells() -> dict[tuple[str, str], str]:
    """Reads the table; cells of combinations that another cell has are empty, and left out."""
    _, _, after = PAGE.read_text().partition("What goes with what; each cell is a test:\n\n")
    table, _, _ = after.partition("\n\n")
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    return {
        (row, column): cell
        for row, *own in rows
        for column, cell in zip(header[1:], own, strict=True)
        if cell
    }


CELLS = cells()
REFUSED = [place for place, cell in CELLS.items() if cell.startswith("refused")]
ALLOWED = [place for place in CELLS if place not in REFUSED]


def test_the_table_has_each_combination() -> None:
    assert {row for row, _ in CELLS} == set(ROWS)
    assert {column for _, column in CELLS} == set(COLUMNS)
    stages, others = len(SCHEDULES) * 5, 4 + 3 + 2
    assert len(CELLS) == stages + others


@pytest.mark.parametrize(("row", "column"), ALLOWED)
def test_what_goes_together_has_a_case(row: str, column: str) -> None:
    found = [case for case in tried() if ROWS[row](case) and COLUMNS[column](case)]
    strategies = re.findall(r"`(\w+)`", CELLS[row, column])
    assert strategies
    assert set(strategies) == {case.strategy for case in found}
    for schedule in re.findall(r"`(\w+)`", row):
        assert any(case.schedule == schedule for case in found)


@pytest.mark.parametrize(("row", "column"), REFUSED)
def test_what_is_refused_is_refused(row: str, column: str) -> None:
    assert MeshStrategy(pp=2, **ARGUMENTS[column]), "without this schedule it is not"
    for schedule in re.findall(r"`(\w+)`", row):
        with pytest.raises(ValueError, match=rf"schedule='{schedule}'.* {SCHEDULES[row]}"):
            MeshStrategy(pp=2, pipeline=PipelineConfig(schedule), **ARGUMENTS[column])

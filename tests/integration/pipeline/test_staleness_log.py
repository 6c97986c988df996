"""How stale weights are is logged for all stages on all ranks, and known after the run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import make_loader, make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.common import EPOCHS, SIZES, trainer_of

NUM_BATCHES = len(SIZES)
"""Between drains."""


class Notes(L.Callback):
    """Keeps what is logged of weights after each batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        logged = trainer.logged_metrics.items()
        self.batches.append({n: float(v) for n, v in logged if "/stage_" in n})


def fit_noted(num_stages: int, directory: Path, options: dict[str, Any]) -> Any:
    module, notes = make_module(), Notes()
    strategy = PipelineStrategy(partition="uniform", **options)
    settings: dict[str, Any] = {"callbacks": [notes], "log_every_n_steps": 1}
    if directory.name:
        settings["logger"] = CSVLogger(directory, name="", version="")
    trainer_of(num_stages, strategy, settings).fit(module, make_loader(), make_loader())
    own_bytes = sum(p.nbytes for p in module.parameters())
    return notes.batches, strategy.staleness, own_bytes


def newest_update(batch: int, lag: int) -> int | None:
    """Gives the update that each rank logs after a batch."""
    since_drain = batch % NUM_BATCHES
    if since_drain >= lag + 2:
        return batch - lag - 2
    return batch - since_drain - 1 if batch >= NUM_BATCHES else None


def expected_logs(num_stages: int, lag: int, staleness: list[list[int]]) -> list[dict[str, float]]:
    updates = [newest_update(batch, lag) for batch in range(EPOCHS * NUM_BATCHES)]
    return [
        {f"staleness/stage_{s}": staleness[s][u] for s in range(num_stages) if u is not None}
        for u in updates
    ]


def only(prefix: str, logs: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{n: v for n, v in log.items() if n.startswith(prefix)} for log in logs]


def test_each_rank_logs_all_stages(workers: WorkerPool, tmp_path: Path) -> None:
    options = {"schedule": "pipedream", "log_staleness": True, "log_discrepancy": True}
    ranks = workers.run(3, fit_noted, 3, tmp_path, options)
    staleness = [
        [min(u, 2 - s) for _ in range(EPOCHS) for u in range(NUM_BATCHES)] for s in range(3)
    ]
    sizes = [own_bytes for *_, own_bytes in ranks]
    for logs, known, _ in ranks:
        assert [list(of_stage) for of_stage in known] == staleness
        assert only("staleness/", logs) == expected_logs(3, 2, staleness)
        assert logs == ranks[0][0]
        names = {f"{n}/stage_{s}" for n in ("stash_bytes", "weight_discrepancy") for s in range(3)}
        last = logs[-1]
        assert last.keys() == names | {f"staleness/stage_{s}" for s in range(3)}
        # The update of the second batch of six: later ones are not known everywhere.
        assert [last[f"stash_bytes/stage_{s}"] for s in range(3)] == [
            count * size for count, size in zip((2, 1, 0), sizes, strict=True)
        ]
        moved = [last[f"weight_discrepancy/stage_{s}"] for s in range(3)]
        assert 1.0 > moved[0] > 0.0 < moved[1] < 1.0
        assert moved[2] == 0.0
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("staleness/stage_0")]
    assert float(rows[-1]["weight_discrepancy/stage_1"]) == pytest.approx(moved[1], rel=1e-5)
    assert len(rows) >= EPOCHS * NUM_BATCHES - 4


@pytest.mark.parametrize(
    ("schedule", "depth", "options"),
    [
        ("pipedream_2bw", 1, {"log_staleness": True, "num_microbatches": 2}),
        ("1f1b", 0, {"log_staleness": True, "num_microbatches": 2}),
    ],
)
def test_other_schedules(
    workers: WorkerPool, schedule: str, depth: int, options: dict[str, Any]
) -> None:
    ranks = workers.run(2, fit_noted, 2, Path(), {"schedule": schedule, **options})
    staleness = [[min(u, depth) for _ in range(EPOCHS) for u in range(NUM_BATCHES)]] * 2
    for logs, known, _ in ranks:
        assert [list(of_stage) for of_stage in known] == staleness
        assert only("staleness/", logs) == expected_logs(2, depth, staleness)
        assert not only("weight", logs)[-1]
        assert logs == ranks[0][0]

"""Plans beside what they take: ``python -m tests.benchmarks.planner``.

In each cell, a model on some ranks over some link, :class:`~lightning_dist.AutoStrategy` measures
and ranks the layouts. Then each of its plans trains. Of some such rounds, the table has the medians
of predicted and measured times side by side and of their ratios, and how far each round's chosen
plan is from the fastest, by the medians. A rank has one thread. Throttled links join hosts of
namespaces, a rank on each, and need root and iproute2.

The speed of a shared machine drifts. So each rank trains alone for some steps beside every run, and
a measured time is given as it would be at the speed that the machine had when the plans were made:
what the plan computes is taken to drift as these steps do, and what it sends not to.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import AutoStrategy, MeshStrategy
from lightning_dist.engine.planning.search.plan import Plan
from recipes.gpt import build_gpt
from recipes.resnet import build_resnet
from tests.benchmarks.contestants import adamw
from tests.benchmarks.memory import peak_of
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.helpers.hosts.cluster import Network, hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.processes.workers import WorkerPool

SECONDS_PER_CELL = 1800
WARMUP = 9  # in the first 8 steps sharded ranks compare their units, one by one


@dataclass(frozen=True)
class Model:
    """A model, and a sample of its input; the loss is cross-entropy over ``num_classes``."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]
    num_classes: int
    batch_size: int = 8


def build_mlp() -> nn.Module:
    wide = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(1024, 16))


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=4,
    )
    return BertForSequenceClassification(config)


def tokens(size: int) -> Tensor:
    return torch.randint(1, 256, (size, 64))


MODELS = MappingProxyType(
    {
        "gpt": Model(lambda: build_gpt(width=256, depth=6, num_heads=4), tokens, 256),
        "mlp": Model(build_mlp, lambda size: torch.randn(size, 1024), 16, batch_size=64),
        "conv": Model(
            lambda: build_resnet(32), lambda size: torch.randn(size, 1, 28, 28), 10, batch_size=16
        ),
        "bert": Model(build_bert, tokens, 4),
    }
)


class Classifier(L.LightningModule):
    """Trains a model of :data:`MODELS`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = MODELS[self.name].build()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = self.model(batch[0])
        logits = getattr(out, "logits", out)
        targets = (
            batch[1].reshape(-1, 1).expand(-1, logits.flatten(0, -2).shape[0] // len(batch[1]))
        )
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Steps(L.Callback):
    """Times the steps after the warm-up, each from its beginning to that of the next."""

    def __init__(self) -> None:
        self._beginnings: list[float] = []

    @property
    def seconds(self) -> float:
        """The median; without the end of the run, which is no part of a step."""
        steps = itertools.pairwise(self._beginnings[WARMUP:])
        return statistics.median(end - begin for begin, end in steps)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self._beginnings.append(time.perf_counter())


def data_of(name: str, count: int) -> TensorDataset:
    """Returns the samples of some steps and one more, for a step ends where another begins."""
    model = MODELS[name]
    size = model.batch_size * (count + 1)
    return TensorDataset(model.sample(size), torch.randint(0, model.num_classes, (size,)))


def fit(name: str, strategy: Any, world: tuple[int, int], data: TensorDataset) -> float:
    """Trains, and returns the seconds of a step after the warm-up."""
    watch = Steps()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world[0],
        num_nodes=world[1],
        strategy=strategy,
        max_epochs=1,
        callbacks=[watch],
        **QUIET_TRAINER,
    )
    trainer.fit(Classifier(name), DataLoader(data, batch_size=MODELS[name].batch_size))
    return watch.seconds


def plain_seconds(name: str, count: int = 9) -> float:
    """Trains without any strategy, for the speed of the machine at this moment."""
    model = MODELS[name]
    module = Classifier(name).train()
    module.configure_model()
    optimizer = module.configure_optimizers()
    labels = torch.randint(0, model.num_classes, (model.batch_size,))
    batch = (model.sample(model.batch_size), labels)
    taken = []
    for _ in range(2 + count):
        start = time.perf_counter()
        module.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


@dataclass(frozen=True)
class Row:
    """A plan, the predicted and measured seconds of a step in each run, and a rank's peak bytes."""

    plan: Plan
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def ratio(self) -> float:
        pairs = zip(self.measured, self.predicted, strict=True)
        return statistics.median(measured / predicted for measured, predicted in pairs)

    @property
    def seconds_per_sample(self) -> float:
        return statistics.median(self.measured) / self.plan.layout.global_batch


@dataclass(frozen=True)
class Cell:
    """The plans of a cell, the first round's best one first, and the best one of each round."""

    rows: list[Row]
    chosen: list[str]


def run_cell(
    name: str, world: tuple[int, int], options: dict[str, Any], count: int, rounds: int
) -> Cell:
    """Ranks the layouts on this rank, and trains with each; in each round anew."""
    quieten()
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    chosen = []
    data = data_of(name, WARMUP + count)
    for _ in range(rounds):
        auto = AutoStrategy(num_plans=1000, **options)
        before = plain_seconds(name)
        fit(name, auto, world, data_of(name, WARMUP + 1))
        assert auto.ranking is not None
        plain = plain_seconds(name)
        reference = (before + plain) / 2
        chosen.append(str(auto.ranking.best.layout))
        for plan in auto.ranking.plans:
            seconds = fit(name, MeshStrategy.from_plan(plan), world, data)
            before, plain = plain, plain_seconds(name)
            drift, expected = (before + plain) / 2 / reference, plan.estimate
            sent = expected.exposed_seconds
            at_that_speed = sent + drift * (expected.step_seconds - sent)
            row = rows.setdefault(str(plan.layout), Row(plan))
            row.predicted.append(expected.step_seconds)
            row.measured.append(seconds * expected.step_seconds / at_that_speed)
    return Cell([*rows.values()], chosen)


def peak_bytes(name: str, world: tuple[int, int], plan: Plan) -> int:
    """Returns the peak of a run on this rank, which is fresh."""
    quieten()
    torch.set_num_threads(1)
    data = data_of(name, WARMUP + 1)
    return peak_of(lambda: fit(name, MeshStrategy.from_plan(plan), world, data))


def with_peak(row: Row, name: str, ranks: int) -> Row:
    pool = WorkerPool()
    try:
        peaks = pool.run(ranks, peak_bytes, name, (ranks, 1), row.plan, timeout=120.0)
    finally:
        pool.close()
    return replace(row, peak_bytes=max(peaks))


def table_of(title: str, cell: Cell) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("plan")
    for heading in ("batch", "predicted ms", "measured ms", "ratio", "samples/s"):
        table.add_column(heading, justify="right")
    for heading in ("predicted MiB", "measured MiB", "ratio"):
        table.add_column(heading, justify="right")
    for row in cell.rows:
        times = [f"{1e3 * statistics.median(t):.1f}" for t in (row.predicted, row.measured)]
        cells = [*times, f"{row.ratio:.2f}", f"{1 / row.seconds_per_sample:.0f}"]
        if row.peak_bytes:
            held = row.plan.estimate.memory.peak
            cells += [f"{held / 2**20:.1f}", f"{row.peak_bytes / 2**20:.1f}"]
            cells.append(f"{row.peak_bytes / held:.2f}")
        table.add_row(str(row.plan.layout), str(row.plan.layout.global_batch), *cells)
    rates = {str(row.plan.layout): row.seconds_per_sample for row in cell.rows}
    losses = sorted(rates[layout] / min(rates.values()) for layout in cell.chosen)
    near = sum(abs(row.ratio - 1.0) <= 0.15 for row in cell.rows)
    table.caption = (
        f"the chosen plan takes {', '.join(f'{loss:.2f}' for loss in losses)} times the fastest"
        f" one's time; {near} of {len(cell.rows)} plans within 15 %"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["loopback", "1gbit", "200mbit"])
    parser.add_argument("--schedules", nargs="+", help="that are allowed; default: all")
    parser.add_argument("--recompute", action="store_true", help="try recomputation, too")
    parser.add_argument("--batches", type=int, default=8, help="timed batches of a run")
    parser.add_argument("--rounds", type=int, default=3, help="rankings, and runs of each plan")
    parser.add_argument("--memory", action="store_true", help="measure peaks, over the loopback")
    asked = parser.parse_args()
    options = {"schedules": asked.schedules, "recompute": asked.recompute}
    for rate in asked.rates:
        for ranks in asked.ranks:
            for name in asked.models:
                with ExitStack() as stack:
                    arguments: tuple[Any, ...] = (options, asked.batches, asked.rounds)
                    if rate == "loopback":
                        pool = WorkerPool()
                        stack.callback(pool.close)
                        case = (run_cell, name, (ranks, 1), *arguments)
                        found = pool.run(ranks, *case, timeout=SECONDS_PER_CELL)
                    else:
                        network = Network(rate=rate)
                        cluster = stack.enter_context(hosts(ranks, networks=[network]))
                        far = HostWorkers(cluster)
                        stack.callback(far.close)
                        case = (run_cell, name, (1, ranks), *arguments)
                        found = far.run_on([*range(ranks)], *case, timeout=SECONDS_PER_CELL)
                cell = found[0]
                if asked.memory and rate == "loopback":
                    cell = replace(cell, rows=[with_peak(r, name, ranks) for r in cell.rows])
                Console(width=140).print(table_of(f"{name}, {ranks} ranks, {rate}", cell))


if __name__ == "__main__":
    main()

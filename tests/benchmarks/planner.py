"""Plans beside what they take: ``python -m tests.benchmarks.planner``.

In each cell, a model on some ranks over some link, :class:`~lightning_dist.AutoStrategy` measures
and ranks the layouts. Then each of its plans trains, and the table has predicted and measured times
side by side, and how far the chosen plan is from the fastest. A rank has one thread. Throttled
links join hosts of namespaces, a rank on each, and need root and iproute2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
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
from tests.benchmarks.contestants import WARMUP, Stopwatch, adamw
from tests.benchmarks.quiet import QUIET_TRAINER, quieten
from tests.helpers.hosts.cluster import Network, hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.processes.workers import WorkerPool

SECONDS_PER_CELL = 900


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
        torch.manual_seed(0)
        self.model = MODELS[name].build()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = self.model(batch[0])
        logits = getattr(out, "logits", out)
        targets = (
            batch[1].reshape(-1, 1).expand(-1, logits.flatten(0, -2).shape[0] // len(batch[1]))
        )
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


def fit(name: str, strategy: Any, world: tuple[int, int], count: int) -> float:
    """Trains, and returns the seconds of a step after the warm-up."""
    model, watch = MODELS[name], Stopwatch(count - WARMUP)
    size = model.batch_size * count
    data = TensorDataset(model.sample(size), torch.randint(0, model.num_classes, (size,)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world[0],
        num_nodes=world[1],
        strategy=strategy,
        max_epochs=1,
        callbacks=[watch],
        **QUIET_TRAINER,
    )
    trainer.fit(Classifier(name), DataLoader(data, batch_size=model.batch_size))
    return watch.seconds


def run_cell(
    name: str, world: tuple[int, int], options: dict[str, Any], count: int, rounds: int
) -> list[tuple[Plan, list[float]]]:
    """Ranks the layouts on this rank, and trains with each."""
    quieten()
    torch.set_num_threads(1)
    auto = AutoStrategy(num_plans=1000, **options)
    fit(name, auto, world, WARMUP + 1)
    assert auto.ranking is not None
    taken: dict[int, list[float]] = {}
    for _ in range(rounds):
        for index, plan in enumerate(auto.ranking.plans):
            strategy = MeshStrategy.from_plan(plan)
            taken.setdefault(index, []).append(fit(name, strategy, world, WARMUP + count))
    return [(plan, taken[index]) for index, plan in enumerate(auto.ranking.plans)]


def table_of(title: str, rows: list[tuple[Plan, list[float]]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("plan")
    for heading in ("batch", "predicted ms", "measured ms", "ratio", "samples/s"):
        table.add_column(heading, justify="right")
    for plan, seconds in rows:
        step, measured = plan.estimate.step_seconds, statistics.median(seconds)
        batch = plan.layout.global_batch
        cells = (f"{step * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{measured / step:.2f}")
        table.add_row(str(plan.layout), str(batch), *cells, f"{batch / measured:.0f}")
    rates = [statistics.median(taken) / plan.layout.global_batch for plan, taken in rows]
    ratios = [r / plan.seconds_per_sample for (plan, _), r in zip(rows, rates, strict=True)]
    near = sum(abs(ratio - 1.0) <= 0.15 for ratio in ratios)
    table.caption = (
        f"the chosen plan takes {rates[0] / min(rates):.2f} times the fastest one's time;"
        f" {near} of {len(rows)} plans within 15 %"
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
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan")
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
                Console(width=120).print(table_of(f"{name}, {ranks} ranks, {rate}", found[0]))


if __name__ == "__main__":
    main()

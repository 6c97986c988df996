"""Metrics that hold metrics, and those that hooks add, have one device's values on each rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from tests.helpers.networks.models import Classifier, make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import DEPTH, TOLERANCE, loaders_of, trainer_of
from tests.integration.conformance.strategies import ENTRIES, TYPICAL


def accuracy(average: Any = "micro") -> Metric:
    return MulticlassAccuracy(3, average=average)


def mean() -> Metric:
    return MeanMetric().set_dtype(torch.float64)


def both() -> MetricCollection:
    return MetricCollection([accuracy("macro"), MulticlassF1Score(3)])


class Measuring(Classifier):
    def __init__(self) -> None:
        super().__init__(depth=DEPTH)
        self.first, self.second = accuracy(), MulticlassF1Score(3)
        self.total = (self.first + self.second) / 2.0
        self.logged = accuracy() * 2.0
        self.running = Running(SumMetric(), window=16)
        self.drawn = BootStrapper(mean(), num_bootstraps=3, sampling_strategy="multinomial")
        self.by_output = MultioutputWrapper(MeanSquaredError(), 3)
        self.of_classes = nn.ModuleDict(
            {
                "by_class": ClasswiseWrapper(accuracy(None), labels=["a", "b", "c"]),
                "extremes": MinMaxMetric(accuracy()),
                "by_task": MultitaskWrapper({"one": accuracy(), "more": both()}),
                "nested": MetricCollection(
                    {"in": both(), "by_class": ClasswiseWrapper(accuracy(None)), "mm": accuracy()}
                ),
                "changed": LambdaInputTransformer(accuracy(), transform_pred=lambda p: -p),
            }
        )
        self.tracker = MetricTracker(accuracy())
        self.trackers = MetricTracker(both())
        self.found: dict[str, Any] = {}

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.trackers.increment()
        self.late = mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        for metric in (self.total, self.logged, self.tracker, self.trackers):
            metric.update(logits, y)
        for name, metric in self.of_classes.items():
            tasks = ({"one": t, "more": t} for t in (logits, y))
            metric.update(*(tasks if name == "by_task" else (logits, y)))
        self.running.update(y)  # whole numbers are exact in its float32
        self.late.update(logits)
        self.drawn.update(torch.full_like(logits[:, 0], self.current_epoch))
        self.by_output.update(logits.sign(), x[:, 0, :3].sign())
        self.log("logged", self.logged)

    def on_validation_epoch_end(self) -> None:
        own = {"running": self.running, "drawn": self.drawn, "by_output": self.by_output}
        own |= {"total": self.total, "first": self.first, "late": self.late}
        own |= dict(self.of_classes.items())
        for name, metric in own.items():
            self.found[f"{self.current_epoch} {name}"] = metric.compute()
        for name, tracker in (("tracker", self.tracker), ("trackers", self.trackers)):
            self.found[f"{self.current_epoch} {name}"] = tracker.compute_all()
            self.found[f"{self.current_epoch} best {name}"] = tracker.best_metric()
        for metric in own.values():
            metric.reset()


def measure(name: str | None) -> tuple[dict[str, Any], float, tuple[int, int]]:
    trainer, entry = trainer_of(name, max_epochs=2)
    module = make_module(Measuring)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "A step has updated a `Running` metric")
        trainer.fit(module, *loaders_of(trainer, entry))
    shared = [m for m in module.modules() if "SharedCompute" in str(vars(m).get("compute"))]
    return module.found, float(trainer.callback_metrics["logged"]), (len(shared), len(caught))


@pytest.mark.some("pipeline-gpipe-2")
@pytest.mark.parametrize("name", [*TYPICAL, "pipeline-2x2"])
def test_metrics_of_metrics_equal_a_single_device(workers: WorkerPool, name: str) -> None:
    ((expected, logged, _),) = workers.run(1, measure, None)
    assert len(expected) == 2 * (6 + 5 + 4)
    ranks = workers.run(ENTRIES[name].devices, measure, name)
    # The last stage's rank tells once.
    has_stages = name.startswith(("pipeline", "pp"))
    assert [count for *_, (_, count) in ranks][:: len(ranks) - 1] == [0, int(has_stages)]
    for found, value, (num_shared, _) in ranks:
        assert value == pytest.approx(logged, abs=TOLERANCE)
        assert found.keys() == expected.keys()
        for key, other in expected.items():
            torch.testing.assert_close(found[key], other, rtol=0, atol=TOLERANCE, msg=key)
        assert num_shared == 0

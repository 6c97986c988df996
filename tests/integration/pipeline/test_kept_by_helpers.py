"""State that steps keep in helper modules, plain objects and arrays is on each rank, too."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class AverageMeter:
    """A sum and a count, as in many projects."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: Tensor, count: int) -> None:
        self.total += float(value.detach()) * count
        self.count += count

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


class SmoothedValue(AverageMeter):
    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[int] = deque(maxlen=3)

    def update(self, value: Tensor, count: int) -> None:
        super().update(value, count)
        self.latest.extend(torch.arange(count).tolist())


class MeterLog:
    def __init__(self) -> None:
        self.meters: dict[str, SmoothedValue] = defaultdict(SmoothedValue)


class Evaluator:
    def __init__(self) -> None:
        self.matrix = np.zeros((3, 3), dtype=np.int64)

    def add(self, logits: Tensor, y: Tensor) -> None:
        np.add.at(self.matrix, (y.numpy(), logits.argmax(-1).numpy()), 1)


class Helper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.losses: list[Tensor] = []
        self.meter = AverageMeter()


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(2)
        self.meter, self.meters = AverageMeter(), {"a": AverageMeter(), "b": AverageMeter()}
        self.meter_log, self.evaluator = MeterLog(), Evaluator()
        self.late: AverageMeter | None = None
        self.helper = Helper()
        self.config = type("Config", (), {})()  # its class cannot be pickled
        self.config.count = 0
        self.by_index = [0] * 100
        self.found: list[Any] = []

    def _add(self, logits: Tensor, y: Tensor) -> Tensor:
        loss, count = F.cross_entropy(logits, y), len(y)
        self.array += np.array([float(loss.detach()) * count, count])
        self.late = self.late or AverageMeter()
        for meter in (self.meter, self.meters["b"], self.helper.meter, self.late):
            meter.update(loss, count)
        self.meter_log.meters["loss"].update(loss, count)
        self.evaluator.add(logits, y)
        self.helper.count += count
        self.helper.losses.append(loss.detach() * count)
        self.config.count += count
        self.by_index[50] += count
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._add(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._add(self.model(batch[0]), batch[1])

    def _end(self) -> None:
        smoothed = self.meter_log.meters["loss"]
        meters = (self.meter, *self.meters.values(), self.helper.meter, self.late, smoothed)
        numbers = [0.0 if meter is None else meter.average for meter in meters]
        numbers += [self.array[0] / max(self.array[1], 1), float(sum(self.helper.losses))]
        counts = [self.helper.count, self.config.count, self.by_index[50]]
        counts += self.evaluator.matrix.ravel().tolist()
        self.found.append((numbers, counts))
        self.array = np.zeros(2)  # some are replaced, some are filled
        self.meter, self.evaluator.matrix[:] = AverageMeter(), 0
        self.helper.losses.clear()

    def on_train_epoch_end(self) -> None:
        self._end()

    def on_validation_epoch_end(self) -> None:
        self._end()


def count(devices: int, name: str) -> list[Any]:
    strategy: Any = "auto"
    if devices > 1:
        strategy = MeshStrategy(pp=2) if name == "mesh" else PipelineStrategy(schedule=name)
    module = make_module(Counting)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(16), make_loader(8))
    return module.found


@pytest.mark.some("1f1b", "mesh")
@pytest.mark.parametrize("name", ["1f1b", "zbv", "mesh"])
def test_all_ranks_have_what_helpers_keep(workers: WorkerPool, name: str) -> None:
    ((*expected,),) = workers.run(1, count, 1, name)
    assert len(expected) == 4
    for found in workers.run(2, count, 2, name):
        for (numbers, counts), (others, other_counts) in zip(found, expected, strict=True):
            assert numbers == pytest.approx(others, abs=1e-12)
            assert counts == other_counts


class Watching(Classifier):
    """Keeps weights of all stages, to look at some of them later."""

    def on_train_start(self) -> None:
        first, last = self.model[0], self.model[-1]
        self.first, self.watched = first.conv.weight, {"last": [last.weight]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shapes = [self.first.shape, self.watched["last"][0].shape]
        return super().training_step(batch, batch_idx)


def watch() -> list[Any]:
    module = make_module(Watching)
    trainer = make_trainer(devices=2, strategy=PipelineStrategy(num_microbatches=2))
    trainer.fit(module, make_loader(16), make_loader(8))
    return [tuple(shape) for shape in module.shapes]


def test_weights_of_other_stages_may_be_kept(workers: WorkerPool) -> None:
    module = make_module(Watching)
    expected = [tuple(w.shape) for w in (module.model[0].conv.weight, module.model[-1].weight)]
    assert workers.run(2, watch) == [expected] * 2

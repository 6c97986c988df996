"""Bad input is a ValueError with the values and the fix, on each rank the same, within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
)
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from lightning_dist.strategies.pipelining import session
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_layers,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool


class Outside(Classifier):
    """Has more beside its sequence than in it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 999)


class Thawed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale.requires_grad_(batch_idx == 1)


class Several(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*make_layers())


class NoSequence(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(12, 3)


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[5].linear.weight = self.model[0].linear.weight


class FailsBeforeItsPart(Tied):
    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_rank == 0:
            raise ValueError("no gradient from here")


class HeldTwice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.model[0]


class Pretrained(Classifier):
    @property
    def backbone(self) -> nn.Module:
        return self.model[0]


class Twice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) + self.model(batch[0]), batch[1])


class NotAtAll(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)


class ValidatesWithout(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Five(Classifier):
    def __init__(self) -> None:
        super().__init__()
        layers = (ConvLayer() for _ in range(3))
        self.model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


class Foreign(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), 0.1)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ManyOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class NoLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch[0])


class SkipsOne(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class LeavesStepsOut(Classifier):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def attempt(
    devices: int, module: type[L.LightningModule], strategy: dict[str, Any], trainer: dict[str, Any]
) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        built = make_trainer(devices=devices, strategy=PipelineStrategy(**strategy), **trainer)
        built.fit(make_module(module), make_loader(), make_loader(8))
    except BaseException as error:
        text = str(error).splitlines()[0]
        return type(error).__name__, text, time.monotonic() - start
    return "nothing", "", time.monotonic() - start


CASES: dict[str, tuple[int, type[L.LightningModule], dict[str, Any], dict[str, Any], str]] = {
    "world size": (3, Classifier, {"num_stages": 2}, {}, r"world size \(3\).*num_stages=2.*2 or 4"),
    "world too small": (2, Classifier, {"num_stages": 3}, {}, r"num_stages=3.*Use 3 devices"),
    "too many stages": (2, NoSequence, {}, {}, r"layers='trace'.*No `nn.Sequential`"),
    "partition sum": (2, Classifier, {"partition": [3, 3]}, {}, r"\[3, 3\].*8 layers.*sum to 6"),
    "partition length": (2, Classifier, {"partition": [8]}, {}, r"2 stages"),
    "several sequences": (2, Several, {}, {}, r"layers='trace'.*Several.*model.*encoder"),
    "outside": (2, Outside, {}, {}, r"Make 'head.weight' part of 'model'.* pass layers='model'"),
    "thawed": (2, Thawed, {}, {}, r"'scale' requires a gradient by now, but is outside"),
    "no such path": (2, Classifier, {"layers": "body"}, {}, r"layers='body'.*'model'"),
    "not a sequence": (2, Classifier, {"layers": "model.0"}, {}, r"is a ConvLayer"),
    "tied": (
        2,
        Tied,
        {"schedule": "pipedream"},
        {},
        r"'0.linear.weight' \(stage 0\).*'5.linear.weight' \(stage 1\).*tied.*pipedream_2bw",
    ),
    "a sum that never comes": (2, FailsBeforeItsPart, {}, {}, "no gradient from here"),
    "held twice": (
        2,
        HeldTwice,
        {},
        {},
        r"'model.0.conv.weight' is also 'first.conv.weight', outside of .*'model'",
    ),
    "called twice": (2, Twice, {}, {}, r"called the pipelined module more than once"),
    "not called": (2, NotAtAll, {}, {}, r"without a call of the pipelined module"),
    "validated without": (
        2,
        ValidatesWithout,
        {},
        {},
        r"^`validation_step`: The step ended without",
    ),
    "skipped": (
        2,
        SkipsOne,
        {},
        {},
        r"^`training_step`, batch 2 of epoch 0: .* returned None.* `collate_fn`, or return a loss",
    ),
    "skipped behind others": (
        2,
        SkipsOne,
        {"schedule": "pipedream"},
        {},
        r"^`training_step`, batch 2 of epoch 0: .* returned None",
    ),
    "few samples": (
        2,
        Classifier,
        {"schedule": "pipedream_2bw", "num_microbatches": 9},
        {},
        r"8 samples.*num_microbatches=9",
    ),
    "manual": (2, Manual, {}, {}, r"automatic_optimization=False"),
    "several optimizers": (2, ManyOptimizers, {}, {}, r"several optimizers"),
    "no loss": (2, NoLoss, {}, {}, r"must return its loss.*NoneType"),
    "accumulation": (
        2,
        Classifier,
        {"schedule": "pipedream"},
        {"accumulate_grad_batches": 2},
        r"accumulate_grad_batches=2.*pipedream",
    ),
    "steps left out": (
        2,
        LeavesStepsOut,
        {"schedule": "pipedream"},
        {},
        r"`optimizer_step` ran its closure outside.*optimizer\.step\(closure=optimizer_closure\)",
    ),
    "accumulation now and then": (
        2,
        Classifier,
        {"schedule": "pipedream"},
        {"callbacks": [GradientAccumulationScheduler({1: 2})]},
        r"^GradientAccumulationScheduler does not go with schedule='pipedream'",
    ),
    "fine-tuning": (
        2,
        Pretrained,
        {},
        {"callbacks": [BackboneFinetuning(1)]},
        r"BackboneFinetuning adds a parameter group.*on_train_epoch_start",
    ),
    "pruning": (
        2,
        Classifier,
        {},
        {"callbacks": [ModelPruning("l1_unstructured")]},
        r"ModelPruning compares all parameters",
    ),
    "an optimizer that cannot be foreseen": (
        2,
        Foreign,
        {"schedule": "pipedream", "staleness_correction": "predict"},
        {},
        r"staleness_correction='predict'.*Adagrad.*SGD with momentum",
    ),
    "micro-batches of rounds": (
        2,
        Classifier,
        {"schedule": "interleaved_1f1b", "num_microbatches": 5},
        {},
        r"num_microbatches=5 .*interleaved_1f1b.* on 2 ranks.* Use 4 or 6",
    ),
    "micro-batches ahead": (
        4,
        Classifier,
        {"schedule": "pipedream_2bw", "num_microbatches": 2},
        {},
        r"num_microbatches=2 .*pipedream_2bw.* on 4 ranks.* Use 3",
    ),
    "a rank that cannot have two": (
        4,
        Five,
        {"schedule": "zbv"},
        {},
        r"num_stages=8 is more than the 5 layers",
    ),
    "stages of another schedule": (
        2,
        Classifier,
        {"schedule": "zbv", "stages_per_rank": 3},
        {},
        r"stages_per_rank=3 .*zbv.*takes 2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_alike_on_each_rank(workers: WorkerPool, name: str) -> None:
    devices, module, strategy, trainer, message = CASES[name]
    answers = workers.run(devices, attempt, devices, module, strategy, trainer)
    for kind, text, seconds in answers:
        assert kind == "ValueError", (kind, text)
        assert text == answers[0][1]
        assert seconds < 10
    with pytest.raises(ValueError, match=message):
        raise ValueError(answers[0][1])


def threads_left(name: str) -> list[str]:
    devices, module, strategy, options, _ = CASES[name]
    before = set(threading.enumerate())
    assert attempt(devices, module, strategy, options)[0] == "ValueError"
    return [t.name for t in threading.enumerate() if t not in before and "-to-" in t.name]


def test_no_channel_is_open_when_an_optimizer_is_refused(workers: WorkerPool) -> None:
    assert workers.run(2, threads_left, "an optimizer that cannot be foreseen") == [[], []]


def threads_left_by_a_failure() -> list[str]:
    before = set(threading.enumerate())
    with patch.object(session, "StageMetrics", side_effect=ValueError("behind the connection")):
        kind, text, _ = attempt(2, Classifier, {}, {})
    assert (kind, "behind the connection" in text) == ("ValueError", True)
    return [t.name for t in threading.enumerate() if t not in before and "-to-" in t.name]


def test_no_channel_is_open_when_something_fails_behind_it(workers: WorkerPool) -> None:
    assert workers.run(2, threads_left_by_a_failure) == [[], []]


def test_more_stages_than_layers(workers: WorkerPool) -> None:
    class_ = {"layers": "model"}
    answers = workers.run(4, attempt, 4, Short, class_, {})
    assert all(kind == "ValueError" for kind, *_ in answers)
    assert "num_stages=4 is more than the 3 layers" in answers[0][1]


class Short(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(ConvLayer(), nn.Flatten(), nn.Linear(12, 3))


def test_a_file_of_other_sizes_is_refused_alike(workers: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    for options, message in (
        ({}, "has 2 rows.* but the pipeline has 3"),
        ({"num_microbatches": 2, "num_stages": 2}, "num_microbatches=2 .* which has 1"),
    ):
        devices = 3 if not options else 2
        strategy = {"schedule": f"file:{path}", **options}
        answers = workers.run(devices, attempt, devices, Classifier, strategy, {})
        assert {(kind, text) for kind, text, _ in answers} == {answers[0][:2]}
        with pytest.raises(ValueError, match=message):
            raise ValueError(answers[0][1])


def test_a_module_of_the_other_package_is_refused_by_lightning() -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        pass

    fit: Callable[..., Any] = make_trainer(devices=1, strategy=PipelineStrategy()).fit
    # Lightning itself looks first, before any strategy is asked.
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        fit(Other())

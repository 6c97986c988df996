"""What steps return and log, and hooks, is what it is on one device."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torchmetrics import SumMetric

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


class LogsByPosition(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("shown", loss, True, False, False, True)
        return loss


def log_by_position(devices: int) -> tuple[dict[str, float], list[str]]:
    trainer = make_trainer(devices=devices, strategy=PipelineStrategy() if devices > 1 else "auto")
    trainer.fit(make_module(LogsByPosition), make_loader(), make_loader(8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, list(trainer.progress_bar_metrics)


def test_arguments_of_log_may_come_by_position(workers: WorkerPool) -> None:
    expected, shown = log_by_position(1)
    assert shown == ["shown"]
    for metrics, found in workers.run(2, log_by_position, 2):
        assert metrics == pytest.approx(expected, abs=1e-12)
        assert found == shown


class ReturnsClasses(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "classes": logits.argmax(-1), "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(v) for name, v in outputs.items() if v.numel() == 1})


def return_classes(devices: int) -> list[dict[str, float]]:
    strategy: Any = PipelineStrategy(num_microbatches=4) if devices > 1 else "auto"
    module = make_module(ReturnsClasses)
    trainer = make_trainer(devices=devices, strategy=strategy)
    trainer.fit(module, make_loader(14), make_loader(8))  # the last micro-batches: 2, 2, 1 and 1
    return module.seen


def test_what_looks_like_a_number_for_one_sample_only(workers: WorkerPool) -> None:
    expected = return_classes(1)
    assert [set(outputs) for outputs in expected] == [{"loss", "twice"}] * 2
    for found in workers.run(2, return_classes, 2):
        for outputs, others in zip(found, expected, strict=True):
            assert outputs == pytest.approx(others, abs=1e-12)


class CountsUpdates(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("updates", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)


def count_updates(devices: int, schedule: str) -> float:
    strategy: Any = PipelineStrategy(schedule=schedule) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(make_module(CountsUpdates), make_loader(), make_loader(8))
    return float(trainer.callback_metrics["updates"])


@pytest.mark.some("pipedream_2bw")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream_2bw"])
def test_hooks_of_updates_log_where_the_pipeline_drains(workers: WorkerPool, schedule: str) -> None:
    expected = count_updates(1, schedule)
    assert workers.run(3, count_updates, 3, schedule) == [expected] * 3


class LogsInHooks(Classifier):
    """Logs what each stage has of its own, under one name and under names of its parameters."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = {
            n: p.grad.square().sum() for n, p in self.named_parameters() if p.grad is not None
        }
        self.log("squares", sum(squares.values()), reduce_fx="sum", sync_dist=True, on_epoch=True)
        self.log_dict({f"square/{n}": s for n, s in squares.items()}, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(self.trainer.callback_metrics) > 2
        self.log("batch", float(batch_idx), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        largest = max(float(p.detach().abs().max()) for p in self.parameters())
        self.log("largest", largest, reduce_fx="max", sync_dist=True)


def log_in_hooks(devices: int, schedule: str) -> tuple[dict[str, float], list[str]]:
    strategy: Any = PipelineStrategy(schedule=schedule) if devices > 1 else "auto"
    module = make_module(LogsInHooks)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(), make_loader(8))
    left = sorted(name for name in vars(module) if name == "log" or name.startswith("on_"))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, left


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hooks_reduce_over_stages(workers: WorkerPool, schedule: str) -> None:
    expected, _ = log_in_hooks(1, schedule)
    assert sum(name.startswith("square/") for name in expected) > 4
    for found, left in workers.run(2, log_in_hooks, 2, schedule):
        assert found == pytest.approx(expected, abs=1e-12)
        assert not left


def log_in_lambda(devices: int) -> dict[str, float]:
    def log(trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        squares = sum(float(gradient.square().sum()) for gradient in gradients)
        module.log("squares", squares, reduce_fx="sum", sync_dist=True, on_epoch=True)

    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    callbacks = [LambdaCallback(on_before_optimizer_step=log)]
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=callbacks)
    trainer.fit(make_module(Classifier), make_loader(), make_loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_functions_of_a_lambda_callback_reduce_over_stages(workers: WorkerPool) -> None:
    expected = log_in_lambda(1)
    assert "squares_epoch" in expected
    for found in workers.run(2, log_in_lambda, 2):
        assert found == pytest.approx(expected, abs=1e-6)


class OnlyUpdates(Classifier):
    """Updates a metric by itself, and logs it: it has a value for the epoch only."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.total.update(batch[1])
        self.log("per_step", self.total)
        self.log("both", self.total, on_step=True, on_epoch=True)
        return loss


def fit_updated(devices: int) -> dict[str, float]:
    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, limit_val_batches=0)
    trainer.fit(make_module(OnlyUpdates), make_loader(24), make_loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_metric_that_is_only_updated_has_no_value_for_the_step(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, fit_updated, 1)
    assert expected.keys() & {"per_step", "both_step"} == set()
    assert expected["both_epoch"] > 0
    for found in workers.run(2, fit_updated, 2):
        assert found == pytest.approx(expected)


class Squeezes(Classifier):
    """Returns one number for each sample, as if a batch had several."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        best = self.model(batch[0])[:, :1].squeeze()
        return {"best": best, "text": "a"}


def predict_squeezed(devices: int) -> list[Tensor]:
    trainer = make_trainer(devices=devices, strategy=PipelineStrategy() if devices > 1 else "auto")
    predicted: Any = trainer.predict(make_module(Squeezes), make_loader(18))
    return [each["best"] for each in predicted]


def test_no_micro_batch_has_one_sample_by_default(workers: WorkerPool) -> None:
    expected = predict_squeezed(1)
    for found in workers.run(2, predict_squeezed, 2):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


class Contrastive(Classifier):
    """Compares each sample with all others of its batch."""

    def _loss(self, batch: Any) -> Tensor:
        features = F.normalize(self.model(batch[0]))
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


def contrast(devices: int, arguments: dict[str, Any]) -> tuple[list[str], float]:
    strategy: Any = PipelineStrategy(**arguments) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1)
    module = make_module(Contrastive)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader(24), make_loader(8))
        val_loss = float(trainer.callback_metrics["val_loss"])
        trainer.predict(module, make_loader(8))
    steps = [re.search(r"`(\w+)` are cut", str(warning.message)) for warning in caught]
    return [found[1] for found in steps if found], val_loss


@pytest.mark.some("1f1b", "pipedream")
@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"num_microbatches": 2}, ["training_step", "validation_step"]),
        ({"schedule": "pipedream"}, ["validation_step"]),
        ({"num_microbatches": 1}, []),
    ],
    ids=["1f1b", "pipedream", "whole"],
)
def test_losses_that_compare_samples_are_warned_of(
    workers: WorkerPool, arguments: dict[str, Any], warned: list[str]
) -> None:
    ((_, expected),) = workers.run(1, contrast, 1, {})
    first, last = workers.run(2, contrast, 2, arguments)
    assert (first[0], last[0]) == ([], warned)
    assert (abs(last[1] - expected) < 1e-12) == (not warned)


class LogsOneName(Classifier):
    """Logs its loss by one name in training and validation."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.monitored: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("val_loss", loss)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.monitored.append((float(metrics["loss"]), float(metrics["val_loss"])))


def monitor_one_name(devices: int, strategy: Any) -> list[tuple[float, float]]:
    module = make_module(LogsOneName)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(24), make_loader(8))
    return module.monitored


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_what_validation_logs_last_is_monitored(workers: WorkerPool, schedule: str) -> None:
    if schedule == "1f1b":
        expected = monitor_one_name(1, "auto")
    for found in workers.run(2, monitor_one_name, 2, PipelineStrategy(schedule=schedule)):
        assert [loss for loss, _ in found] == [validated for _, validated in found]
        if schedule == "1f1b":
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))

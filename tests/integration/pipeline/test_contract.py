"""What Lightning users count on, under a pipeline."""

from __future__ import annotations

import math
import random
import time
import weakref
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import PipelineStrategy
from lightning_dist.engine.pipeline.stage import Stage
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES, PipelineShape, find_family
from lightning_dist.engine.schedules.stash_depth import num_copies
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


def strategy_or_auto(strategy: dict[str, Any] | None) -> Any:
    return "auto" if strategy is None else PipelineStrategy(**strategy)


def single(case: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        return case(1, None, *args)


# --- torchmetrics --------------------------------------------------------------------------------


class Metered(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(3, average="micro")
        self.val_accuracy = MulticlassAccuracy(3, average="macro")
        self.computed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_accuracy.update(self.model(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy)

    def on_validation_epoch_end(self) -> None:
        self.computed.append(float(self.val_accuracy.compute()))


def fit_metered(devices: int, strategy: dict[str, Any] | None) -> Any:
    module = make_module(Metered)
    trainer = make_trainer(devices=devices, strategy=strategy_or_auto(strategy), max_epochs=2)
    trainer.fit(module, make_loader(40), make_loader(30))
    return {n: float(v) for n, v in trainer.callback_metrics.items()}, module.computed


def test_torchmetrics_give_the_same_on_each_rank(workers: WorkerPool) -> None:
    ranks = workers.run(3, fit_metered, 3, {"schedule": "1f1b", "num_microbatches": 4})
    metrics, computed = single(fit_metered)
    assert set(metrics) >= {"train_accuracy_step", "train_accuracy_epoch", "val_accuracy"}
    for rank in ranks:
        assert rank[0] == pytest.approx(metrics, abs=1e-6)
        assert rank[1] == pytest.approx(computed, abs=1e-6)


# --- batches and activations of any shape --------------------------------------------------------


@dataclass
class Pair:
    kept: Tensor
    mask: Tensor


class ToPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.linear(x), x > 0)


class InPair(ToPair):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        return Pair(pair.kept + torch.tanh(self.linear(pair.kept)) * pair.mask, pair.mask)


class FromPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, pair: Pair) -> dict[str, Tensor]:
        return {"logits": self.linear(pair.kept), "unused": pair.kept.detach()}


class Trees(Classifier):
    def __init__(self, freeze: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(ToPair(), InPair(), InPair(), FromPair())
        if freeze:
            self.model[:2].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = {"x": batch[0].flatten(1), "name": "batch", "y": batch[1]}
        loss = F.cross_entropy(self.model(inputs["x"])["logits"], inputs["y"])
        self.log("train_loss", loss)
        return {"loss": loss, "extra": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def fit_trees(devices: int, strategy: dict[str, Any] | None, freeze: bool) -> Any:
    module = make_module(Trees, freeze=freeze)
    trainer = make_trainer(
        devices=devices, strategy=strategy_or_auto(strategy), limit_val_batches=0
    )
    trainer.fit(module, make_loader(), make_loader(8))
    return state_of(module)


@pytest.mark.some("half frozen")
@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "half frozen"])
def test_activations_of_any_tree_and_frozen_layers(workers: WorkerPool, freeze: bool) -> None:
    ranks = workers.run(4, fit_trees, 4, {"schedule": "1f1b", "num_microbatches": 3}, freeze)
    expected = single(fit_trees, freeze)
    for state in ranks:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


# --- precision -----------------------------------------------------------------------------------


def fit_mixed(devices: int, strategy: dict[str, Any] | None) -> Any:
    module = make_module().float()
    trainer = make_trainer(
        devices=devices, strategy=strategy_or_auto(strategy), precision="bf16-mixed"
    )
    loader = torch.utils.data.DataLoader(
        [(x.float(), y) for x, y in make_loader(16).dataset], batch_size=8
    )
    trainer.fit(module, loader, loader)
    return state_of(module)


def test_bf16_mixed_equals_a_single_device(workers: WorkerPool) -> None:
    ranks = workers.run(2, fit_mixed, 2, {"schedule": "gpipe", "num_microbatches": 1})
    expected = single(fit_mixed)
    for state in ranks:
        for name, value in state.items():
            assert value.dtype is torch.float32
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


# --- timing and memory ---------------------------------------------------------------------------


def loader_for(schedule: str) -> Any:
    """Gives batches enough for what a schedule does to repeat itself, and an uneven one."""
    return make_loader(38 if find_family(schedule).update_rule.is_asynchronous else 22)


class Sleepy(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(random.random() * 0.004)
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(random.random() * 0.004))
        return y


def fit_sleepy(devices: int, schedule: str, sleepy: bool) -> Any:
    module = make_module()
    if sleepy:
        for index, layer in enumerate(module.model):
            module.model[index] = Sleepy(layer)
    trainer = make_trainer(
        devices=devices, strategy=PipelineStrategy(schedule=schedule, partition="uniform")
    )
    trainer.fit(module, loader_for(schedule), make_loader(8))
    return {name.replace(".layer.", "."): value for name, value in state_of(module).items()}


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_random_sleeps_change_nothing(workers: WorkerPool, schedule: str) -> None:
    awake = workers.run(3, fit_sleepy, 3, schedule, False)
    sleepy = workers.run(3, fit_sleepy, 3, schedule, True)
    for left, right in zip(awake, sleepy, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


class Census(L.Callback):
    """Counts, with weak references, what is alive at each backward."""

    def __init__(self) -> None:
        self.versions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.flights: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak_versions = self.peak_flights = 0

    def watch(self) -> None:
        original = Stage.forward

        def forward(stage: Stage, *args: Any) -> Any:
            result = original(stage, *args)
            for flight in stage.in_flight.values():
                self.flights.add(flight)
                if flight.weights.aliases:
                    self.versions.add(flight.weights)
            self.peak_flights = max(self.peak_flights, len(self.flights))
            self.peak_versions = max(self.peak_versions, len(self.versions))
            return result

        Stage.forward = forward  # type: ignore[method-assign]
        self.undo = lambda: setattr(Stage, "forward", original)


def count_alive(devices: int, schedule: str) -> Any:
    census = Census()
    census.watch()
    is_flushed = not find_family(schedule).update_rule.is_asynchronous
    count = 8 if is_flushed else "auto"
    strategy = PipelineStrategy(schedule=schedule, num_microbatches=count)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(make_module(), make_loader(16 if is_flushed else 64), make_loader(8))
    census.undo()
    assert not census.flights
    return census.peak_versions, census.peak_flights, strategy.peak_stash_bytes


def test_no_more_versions_and_activations_than_stages_behind(workers: WorkerPool) -> None:
    ranks = workers.run(4, count_alive, 4, "pipedream")
    assert [(versions, flights) for versions, flights, _ in ranks] == [
        (4 - s, 4 - s) for s in range(4)
    ]
    assert ranks[0][2][3] == 0
    assert min(ranks[0][2][:3]) > 0


def stash_under_vertical_sync(devices: int) -> tuple[tuple[int, ...], int]:
    strategy = PipelineStrategy(schedule="pipedream", weight_versions="vertical_sync")
    module = make_module()
    make_trainer(devices=devices, strategy=strategy).fit(module, make_loader(64), make_loader(8))
    return strategy.peak_stash_bytes, sum(p.nbytes for p in module.parameters())


def test_vertical_sync_holds_a_version_per_stage_on_each(workers: WorkerPool) -> None:
    for stage, (stashes, num_bytes) in enumerate(workers.run(4, stash_under_vertical_sync, 4)):
        assert stashes[stage] == 3 * num_bytes


@pytest.mark.some("zbv")
@pytest.mark.parametrize(
    "schedule", [n for n in SCHEDULE_NAMES if find_family(n).update_rule.splits_batches]
)
def test_no_more_activations_than_the_schedule_says(workers: WorkerPool, schedule: str) -> None:
    family = find_family(schedule)
    homes = family.rank_of_stage(4)
    overlaps = family.update_rule.is_asynchronous
    built = family.build(homes, 4, 3) if overlaps else family.build(homes, 8)
    ranks = workers.run(4, count_alive, 4, schedule)
    assert [flights for _, flights, _ in ranks] == [built.in_flight(rank) for rank in range(4)]
    wanted = [0] * 4
    if overlaps:
        shape = PipelineShape(schedule, 4, (1,) * len(homes), 0)
        wanted = [1 + count for count in num_copies(shape, "stash")]
    assert schedule != "pipedream_2bw" or wanted == [2, 2, 2, 1]
    assert [versions for versions, *_ in ranks] == wanted


# --- summary and hooks ---------------------------------------------------------------------------


class SummaryCheck(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.total = summarize(pl_module).total_parameters


def count_parameters(devices: int, strategy: dict[str, Any] | None) -> Any:
    check = SummaryCheck()
    module = make_module()
    if strategy is not None:  # Lightning would run it through layers that are elsewhere
        module.example_input_array = torch.zeros(2, 2, 6, dtype=torch.float64)
    trainer = make_trainer(
        devices=devices,
        strategy=strategy_or_auto(strategy),
        callbacks=[check, ModelSummary()],
        enable_model_summary=True,
        limit_train_batches=1,
        limit_val_batches=0,
    )
    trainer.fit(module, make_loader(), make_loader(8))
    return check.total, sum(p.numel() for p in module.parameters())


def test_the_summary_shows_the_whole_model(workers: WorkerPool) -> None:
    ranks = workers.run(2, count_parameters, 2, {})
    total, _ = single(count_parameters)
    assert [shown for shown, _ in ranks] == [total, total]
    assert sum(held for _, held in ranks) == total


class Seen(L.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.requires_grad]
        assert all(g is not None and g.isfinite().all() for g in gradients)
        self.steps.append((trainer.global_step, len(gradients)))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def watch_hooks(devices: int, strategy: dict[str, Any] | None) -> Any:
    seen = Seen()
    trainer = make_trainer(devices=devices, strategy=strategy_or_auto(strategy), callbacks=[seen])
    trainer.fit(make_module(), make_loader(48), make_loader(8))
    return len(seen.steps), seen.losses


@pytest.mark.some("pipedream-2")
@pytest.mark.parametrize(("schedule", "lag"), [("1f1b", 0), ("pipedream", 2), ("pipedream_2bw", 1)])
def test_hooks_see_each_update_and_the_true_loss(
    workers: WorkerPool, schedule: str, lag: int
) -> None:
    ranks = workers.run(3, watch_hooks, 3, {"schedule": schedule})
    num_updates, losses = single(watch_hooks)
    for updates, seen in ranks:
        assert updates == num_updates == 6
        if schedule == "1f1b":
            assert seen == pytest.approx(losses, abs=1e-12)
        else:  # known some batches later, but for the first one and the last of the epoch
            assert seen[: lag + 1] == pytest.approx([losses[0]] * (lag + 1), abs=1e-12)
            assert all(map(math.isfinite, seen))
    assert len({str(seen) for _, seen in ranks}) == 1


class ClipsItself(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def clip_under_pipedream(
    devices: int, module: type[Classifier], options: dict[str, Any]
) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(devices=devices, strategy="pipeline_pipedream", **options)
        trainer.fit(make_module(module), make_loader(16), make_loader(8))
    return [str(w.message) for w in caught if "clips by the norm" in str(w.message)]


@pytest.mark.parametrize(
    ("module", "options"), [(Classifier, {"gradient_clip_val": 0.1}), (ClipsItself, {})]
)
def test_clipping_per_stage_is_said_once(
    workers: WorkerPool, module: type[Classifier], options: dict[str, Any]
) -> None:
    first, second = workers.run(2, clip_under_pipedream, 2, module, options)
    assert len(first) == 1
    assert second == []

"""Layers that sleep tell the balancer which cut would be faster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_dist import DDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import (
    MixedPrecision,
    ShardedWeightAveraging,
    StageBalancer,
    StepProfiler,
)
from lightning_dist.engine.planning.balance import Balance
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import Classifier, make_data, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool

SLEEPS_MS = (12.0, 1.0, 1.0, 1.0)


class Sleepy(nn.Module):
    def __init__(self, sleep_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.sleep_ms = sleep_ms

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleep_ms / 1e3)
        return self.linear(x)


class Lopsided(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Sleepy(sleep_ms) for sleep_ms in SLEEPS_MS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0].flatten(1))[:, :3], batch[1])


class AllMetrics(L.Callback):
    """Keeps each metric's newest value."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.values |= {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(
    schedule: str, num_microbatches: Any, cut: list[int], **options: Any
) -> tuple[Balance | None, dict[str, float], tuple[int, ...]]:
    balancer = StageBalancer(every_n_steps=4, warmup_steps=1, measured_steps=3, **options)
    strategy = PipelineStrategy(schedule=schedule, num_microbatches=num_microbatches, partition=cut)
    metrics = AllMetrics()
    callbacks = [balancer, metrics]
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=callbacks, limit_val_batches=0)
    loader = DataLoader(make_data(8 * 9), batch_size=8)
    trainer.fit(make_module(Lopsided), loader, loader)
    assert strategy.config.partition is not None
    return balancer.balance, metrics.values, tuple(strategy.config.partition)


@pytest.mark.some("pipedream-auto")
@pytest.mark.parametrize(("schedule", "num_microbatches"), [("1f1b", 4), ("pipedream", "auto")])
def test_the_better_cut_is_found_and_known_everywhere(
    workers: WorkerPool, schedule: str, num_microbatches: Any
) -> None:
    (balance, metrics, cut), other = workers.run(2, fit, schedule, num_microbatches, [3, 1])
    assert other == (balance, metrics, cut)
    assert cut == (3, 1)
    assert balance is not None
    assert [layer.name for layer in balance.costs.layers] == ["0", "1", "2", "3"]
    assert balance.better_cut == (1, 3)
    for layer, sleep_ms in zip(balance.costs.layers, SLEEPS_MS, strict=True):
        assert layer.forward_seconds >= sleep_ms / 1e3
        assert layer.backward_seconds > 0
        assert layer.boundary_bytes == 8 // (4 if schedule == "1f1b" else 1) * 12 * 8
    assert metrics["balance/gain"] == pytest.approx(balance.gain, rel=1e-5)
    assert metrics["balance/stage_1_seconds"] < metrics["balance/stage_0_seconds"]
    assert metrics["balance/measured_step_seconds"] > 0


class Skipping(Lopsided):
    """Skips the rest of the first epoch from its second batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


def fit_skipping() -> tuple[bool, list[int]]:
    balancer = StageBalancer(every_n_steps=4, warmup_steps=1, measured_steps=2)
    strategy = PipelineStrategy(num_microbatches=4, partition=[2, 2])
    options = {"callbacks": [balancer], "limit_val_batches": 0, "max_epochs": 2}
    module = make_module(Skipping)
    counts: list[int] = []
    layers = [*module.model]
    module.on_train_end = lambda: counts.extend(len(layer._forward_hooks) for layer in layers)
    loader = DataLoader(make_data(8 * 4), batch_size=8)
    make_trainer(devices=2, strategy=strategy, **options).fit(module, loader, loader)
    return balancer.balance is not None, counts


def test_a_skipped_batch_leaves_no_hooks_at_the_layers(workers: WorkerPool) -> None:
    assert workers.run(2, fit_skipping) == [(True, [0] * 4)] * 2


def fit_in_many_ways() -> Any:
    moved = fit("1f1b", 4, [3, 1], action="rebalance")
    # Each layer takes 3.7 kB (weights, gradients, momentum) and what is in flight.
    tight = fit("1f1b", 4, [3, 1], action="rebalance", min_gain=0.01, memory_cap_bytes=10_500)
    hopeless = fit("1f1b", 4, [3, 1], action="rebalance", memory_cap_bytes=2_000)
    return moved, tight, hopeless


def fit_beside_others(directory: str) -> tuple[Balance | None, ProfileReport | None]:
    balancer = StageBalancer(4, warmup_steps=1, measured_steps=3, action="rebalance")
    profiler = StepProfiler(100, 2, directory, warmup_steps=5)
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(num_microbatches=4, partition=[3, 1]),
        callbacks=[balancer, profiler, MixedPrecision()],
        limit_val_batches=0,
    )
    loader = DataLoader(make_data(8 * 10), batch_size=8)
    trainer.fit(make_module(Lopsided).float(), loader, loader)
    return balancer.balance, profiler.report


def test_other_callbacks_follow_the_layers(workers: WorkerPool, tmp_path: Path) -> None:
    for balance, report in workers.run(2, fit_beside_others, str(tmp_path)):
        assert balance is not None
        assert balance.cut == (1, 3)  # of the report after the move
        assert report is not None
        assert [layer.name for layer in report.layers] == ["0", "1", "2", "3"]
        for layer, sleep_ms in zip(report.layers, SLEEPS_MS, strict=True):
            assert layer.forward_seconds >= sleep_ms / 1e3
        first, last = (record.memory for record in report.records)
        for use, num_layers in ((first, 1), (last, 3)):
            assert use.predicted is not None
            assert use.measured.parameters == num_layers * (12 * 12 + 12) * 4
            assert use.measured.optimizer_state == use.predicted.optimizer_state


def test_layers_move_where_it_pays_and_they_fit(workers: WorkerPool) -> None:
    first, second = workers.run(2, fit_in_many_ways)
    assert first == second
    (balance, metrics, cut), (_, _, tight_cut), (hopeless, no_moves, present) = first
    assert cut == (1, 3)
    assert metrics["balance/moved_layers"] == 2
    assert metrics["balance/move_seconds"] > 0
    assert balance is not None
    assert balance.cut == balance.better_cut == (1, 3)  # of the report after the move
    assert tight_cut == (2, 2)
    assert present == hopeless.better_cut == (3, 1)
    assert "balance/moved_layers" not in no_moves


def fit_on_mesh(sizes: dict[str, int]) -> Balance | None:
    strategy = MeshStrategy(
        **{"pp": 2, "dp_shard": 1, **sizes},
        pipeline=PipelineConfig(num_microbatches=4, partition=[3, 1]),
        tensor=TensorConfig(plan={"model.*.linear": "colwise_gather"}),
    )
    balancer = StageBalancer(warmup_steps=1, measured_steps=3)
    options = {"limit_val_batches": 0, "max_steps": 4}
    trainer = make_trainer(devices=4, strategy=strategy, callbacks=[balancer], **options)
    loader = DataLoader(make_data(8 * 4), batch_size=8)
    trainer.fit(make_module(Lopsided), loader, loader)
    return balancer.balance


def fit_on_meshes() -> list[Balance | None]:
    return [fit_on_mesh({"dp_shard": 2}), fit_on_mesh({"tp": 2})]


@pytest.mark.long
def test_stages_of_a_mesh_are_reported(workers: WorkerPool) -> None:
    first, *others = workers.run(4, fit_on_meshes)
    assert all(other == first for other in others)
    for balance in first:
        assert balance is not None
        assert balance.cut == (3, 1)
        assert balance.better_cut in ((1, 3), (2, 2))  # gathering takes its time too
        for layer, sleep_ms in zip(balance.costs.layers, SLEEPS_MS, strict=True):
            assert layer.forward_seconds >= sleep_ms / 1e3
            assert layer.backward_seconds > 0
            assert layer.boundary_bytes == 2 * 12 * 8
            # Half of the parameters, of two gradients and of the momentum is here.
            assert layer.resident_bytes == 3 * layer.parameter_bytes
            assert layer.parameter_bytes == (12 * 12 + 12) * 8 / 2


def refusals_on_a_mesh() -> list[str]:
    asked = [
        (StageBalancer(action="rebalance"), MeshStrategy(pp=2)),
        (StageBalancer(), MeshStrategy(dp_shard=2)),
        (StageBalancer(), DDPStrategy()),
    ]
    answers = []
    for balancer, strategy in asked:
        trainer = make_trainer(devices=2, strategy=strategy, callbacks=[balancer])
        loader = DataLoader(make_data(8), batch_size=8)
        with pytest.raises(ValueError) as error:  # noqa: PT011  (what it says is returned)
            trainer.fit(make_module(Lopsided), loader, loader)
        answers.append(str(error.value))
    return answers


def test_what_has_no_stages_or_none_that_move(workers: WorkerPool) -> None:
    first, second = workers.run(2, refusals_on_a_mesh)
    assert first == second
    moves, mesh, ddp = first
    assert "on a mesh each rank has shards of its layers, or pieces" in moves
    assert "MeshStrategy has none here" in mesh
    assert "DDPStrategy has none here" in ddp


def test_bad_arguments_and_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"measured_steps=9 must be .* every_n_steps=4\. For a"):
        StageBalancer(every_n_steps=4, measured_steps=9)
    with pytest.raises(ValueError, match="warmup_steps=-1 must be an integer of at least 0"):
        StageBalancer(warmup_steps=-1)
    with pytest.raises(ValueError, match="min_gain=1.5 must be a share of a step"):
        StageBalancer(min_gain=1.5)
    with pytest.raises(ValueError, match="action='move' is unknown; use one of .*'rebalance'"):
        StageBalancer(action="move")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_cap_bytes=-1 must be a number above 0"):
        StageBalancer(memory_cap_bytes=-1)
    averaging = [StageBalancer(action="rebalance"), ShardedWeightAveraging()]
    trainer = make_trainer(devices=1, strategy=PipelineStrategy(), callbacks=averaging)
    with pytest.raises(ValueError, match="moves layers, but ShardedWeightAveraging's averages"):
        averaging[0].setup(trainer, make_module(), "fit")
    trainer = make_trainer(devices=1, callbacks=[StageBalancer()])
    loader = DataLoader(make_data(8), batch_size=8)
    with pytest.raises(ValueError, match="SingleDeviceStrategy has none here"):
        trainer.fit(make_module(), loader, loader)

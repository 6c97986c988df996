"""Synchronous pipelines give what a single device gives: weights, metrics, predictions."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DistributedSampler

from lightning_dist import PipelineStrategy
from lightning_dist.engine.schedules.registry import FAMILIES, SCHEDULE_NAMES, find_family
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


def fit(
    strategy: dict[str, Any] | None, devices: int, trainer_args: dict[str, Any], **module: Any
) -> Any:
    model = make_module(**module)
    trainer = make_trainer(
        devices=devices,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        **{"max_epochs": 2, **trainer_args},
    )
    trainer.fit(model, make_loader(30), make_loader(22))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state_of(model), metrics


def assert_equal_to_single(ranks: list[Any], single: Any, tolerance: float = 1e-12) -> None:
    states: dict[str, torch.Tensor] = {}
    for state, metrics in ranks:
        states.update(state)
        assert metrics == ranks[0][1], "each rank must know the same numbers"
        assert metrics == pytest.approx(single[1], abs=tolerance)
    assert states.keys() == single[0].keys()
    for name, value in states.items():
        assert float((value - single[0][name]).abs().max()) < tolerance, name


def single_device(trainer_args: dict[str, Any], **module: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        return fit(None, 1, trainer_args, **module)


SYNCHRONOUS = [n for n, f in FAMILIES.items() if not f.update_rule.is_asynchronous]


@pytest.mark.some("2-adamw-interleaved_1f1b", "3-sgd-zbv")
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize(("num_ranks", "optimizer"), [(2, "adamw"), (3, "sgd"), (4, "adamw")])
def test_fit_equals_a_single_device(
    workers: WorkerPool, num_ranks: int, schedule: str, optimizer: str
) -> None:
    # Batches of 8 in 3 micro-batches, and a last one of 6: uneven all over.
    strategy = {"schedule": schedule, "num_microbatches": 3}
    ranks = workers.run(num_ranks, case, strategy, num_ranks, {}, {"optimizer": optimizer})
    assert_equal_to_single(ranks, single_device({}, optimizer=optimizer))


@pytest.mark.some("looped_bfs")
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "looped_bfs"])
def test_more_stages_than_two_per_rank_equal_a_single_device(
    workers: WorkerPool, schedule: str
) -> None:
    strategy = {"schedule": schedule, "num_microbatches": 4, "stages_per_rank": 4}
    ranks = workers.run(2, case, strategy, 2, {}, {})
    assert_equal_to_single(ranks, single_device({}))


def test_a_schedule_from_a_file_equals_a_single_device(workers: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    # Backwards out of order, and one of them parted in two.
    path.write_text(
        "0F0,0F1,3F1,3B1,3F0,3I0,0B1,,0B0,3W0\n1F0,1F1,2F1,2F0,2B1,1B1,2B0,1B0\n".replace(" ", "")
    )
    strategy = {"schedule": f"file:{path}"}
    ranks = workers.run(2, case, strategy, 2, {}, {})
    assert_equal_to_single(ranks, single_device({}))


def case(strategy: Any, devices: int, trainer: Any, module: Any) -> Any:
    return fit(strategy, devices, trainer, **module)


@pytest.mark.some("*max_steps*")
@pytest.mark.parametrize(
    "trainer_args",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1e-2},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"max_steps": 4, "max_epochs": -1},
        {"limit_train_batches": 3, "limit_val_batches": 2},
        {"overfit_batches": 2},
        {"fast_dev_run": True},
        {"val_check_interval": 2},
        {"num_sanity_val_steps": 2},
        {"detect_anomaly": False, "precision": "64-true"},
    ],
    ids=str,
)
def test_trainer_options_equal_a_single_device(
    workers: WorkerPool, trainer_args: dict[str, Any]
) -> None:
    strategy = {"schedule": "1f1b", "num_microbatches": 4}
    ranks = workers.run(2, case, strategy, 2, trainer_args, {"schedule_lr": True})
    assert_equal_to_single(ranks, single_device(trainer_args, schedule_lr=True))


def fit_replicas(devices: int, schedule: str | None) -> Any:
    module = make_module()
    replicas = devices // 2 if schedule else 1
    strategy: Any = "auto"
    if schedule:
        num_stages = len(find_family(schedule).rank_of_stage(2))
        strategy = PipelineStrategy(
            num_stages=num_stages, schedule=schedule, num_microbatches=2, partition="uniform"
        )
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2, **options)

    def loader(size: int) -> Any:
        data, sampler = make_data(size), None
        if schedule:
            place = trainer.strategy.distributed_sampler_kwargs
            assert place["num_replicas"] == replicas
            sampler = DistributedSampler(data, shuffle=False, **place)
        return torch.utils.data.DataLoader(data, batch_size=8 // replicas, sampler=sampler)

    trainer.fit(module, loader(48), loader(24))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state_of(module), metrics


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_two_replicas_of_two_ranks_equal_a_single_device(
    workers: WorkerPool, schedule: str
) -> None:
    ranks = workers.run(4, fit_replicas, 4, schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        single = fit_replicas(1, None)
    assert_equal_to_single(ranks, single)
    for name in ranks[0][0]:
        assert torch.equal(ranks[0][0][name], ranks[1][0][name])


def fit_as_a_user_would(devices: int, strategy: dict[str, Any] | None, seeded: bool) -> Any:
    module = make_module()
    torch.manual_seed(5 if seeded else int(os.environ["RANK"]))
    random.seed(int(os.environ.get("RANK", "0")))
    drawn: list[float] = []

    def step(batch: Any, batch_idx: int) -> Any:
        drawn.append(random.random())
        return Classifier.training_step(module, batch, batch_idx)

    module.training_step = step
    trainer = make_trainer(
        devices=devices,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        use_distributed_sampler=True,
        max_epochs=2,
    )
    trainer.fit(module, make_loader(shuffle=True), make_loader(30))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return (state_of(module), metrics), drawn


def test_the_default_trainer_reads_in_the_order_of_a_single_device(workers: WorkerPool) -> None:
    ranks = workers.run(2, fit_as_a_user_would, 2, {"schedule": "1f1b"}, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        single = fit_as_a_user_would(1, None, True)
    assert_equal_to_single([rank for rank, _ in ranks], single[0])


def test_processes_that_nobody_seeded_draw_alike(workers: WorkerPool) -> None:
    ranks = workers.run(2, fit_as_a_user_would, 2, {"schedule": "pipedream"}, False)
    assert ranks[0][1] == ranks[1][1]
    assert len(ranks[0][1]) == 12
    assert ranks[0][0][1] == ranks[1][0][1]


def predict(devices: int, schedule: str | None) -> Any:
    module = make_module()
    strategy = "auto" if schedule is None else PipelineStrategy(schedule=schedule)
    trainer = make_trainer(devices=devices, strategy=strategy)
    predictions = trainer.predict(module, make_loader(21))
    tested = trainer.test(module, make_loader(21), verbose=False)
    validated = trainer.validate(module, make_loader(21), verbose=False)
    return predictions, tested, validated


@pytest.mark.some("pipedream_2bw")
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_predictions_are_whole_and_in_order_on_each_rank(
    workers: WorkerPool, schedule: str
) -> None:
    ranks = workers.run(3, predict, 3, schedule)
    expected = predict(1, None)
    for predictions, tested, validated in ranks:
        assert [len(p) for p in predictions] == [8, 8, 5]
        for actual, wanted in zip(predictions, expected[0], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
        assert tested == [pytest.approx(expected[1][0], abs=1e-12)]
        assert validated == [pytest.approx(expected[2][0], abs=1e-12)]


def fit_twice(devices: int, schedule: str) -> Any:
    module = make_module()
    strategy = PipelineStrategy(schedule=schedule)
    trainer = make_trainer(devices=devices, strategy=strategy)
    trainer.fit(module, make_loader(), make_loader(8))
    first = state_of(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(), make_loader(8))
    second = state_of(module)
    return [float((second[n] - first[n]).abs().max()) for n in first]


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_fit_twice_goes_on(workers: WorkerPool, schedule: str) -> None:
    for changes in workers.run(2, fit_twice, 2, schedule):
        assert min(changes) > 0


def stop_early(devices: int, schedule: str) -> Any:
    module = make_module(Classifier)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    trainer = make_trainer(
        devices=devices,
        strategy=PipelineStrategy(schedule=schedule),
        callbacks=[stopping],
        max_epochs=10,
    )
    trainer.fit(module, make_loader(), make_loader())
    return trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_early_stopping_sees_the_same_on_each_rank(workers: WorkerPool, schedule: str) -> None:
    ranks = workers.run(2, stop_early, 2, schedule)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == 2

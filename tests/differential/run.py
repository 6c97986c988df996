"""Run a case on one rank of a strategy, or on one device."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_dist.callbacks import MixedPrecision
from tests.differential.case import Case
from tests.differential.dials.callbacks import WRITING, SaveAtStep, make_callbacks
from tests.differential.dials.data import Loaders, Place, make_validation_loader
from tests.differential.dials.module import Task, make_task
from tests.differential.dials.strategies import STRATEGIES
from tests.differential.machine import ON_CPU, Machine
from tests.differential.observe import (
    CALLBACK_HOOKS,
    MODULE_HOOKS,
    MemoryLogger,
    Observation,
    recording,
)
from tests.differential.oracle_strategy import CatchUp, OracleStrategy, staleness_of

HANDOVER = "handover.ckpt"
ENOUGH_BATCHES = 15
TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "anomaly": {"detect_anomaly": True},
    "no_inference_mode": {"inference_mode": False},
    "overfit": {"overfit_batches": 2},
    "dev_run": {"fast_dev_run": 3},
    "min_steps": {"min_steps": 5},
    "min_epochs": {"min_epochs": 2},
}


@dataclass(frozen=True)
class _Ranks:
    """A number of ranks on a machine, and their strategy.

    Attributes:
        machine: The machine.
        make: Builds the strategy.
        count: Number of ranks.
    """

    machine: Machine
    make: Callable[[], Any]
    count: int = 1


def run_rank(case: Case, folder: str, machine: Machine = ON_CPU) -> Observation:
    """Runs a case on this rank.

    Args:
        case: The case.
        folder: Where to write checkpoints, the same on each rank.
        machine: What the ranks run on.
    """
    entry = STRATEGIES[case.strategy]
    make = partial(entry.strategy_for, case.model)
    return _run(case, folder, _Ranks(machine, make, entry.devices))


def run_reference(case: Case, folder: str, machine: Machine = ON_CPU) -> Observation:
    """Runs a case on one device, with the weights that an asynchronous schedule would use.

    Args:
        case: The case.
        folder: Where to write checkpoints.
        machine: What has the device.
    """
    with _without_ranks():
        return _run(case, folder, _make_reference(case, machine))


def _make_reference(case: Case, machine: Machine) -> _Ranks:
    entry = STRATEGIES[case.strategy]
    versions = entry.versions

    def make() -> Any:
        if versions is None:
            return "auto"
        lag = 1 if versions == "2bw" else entry.stages - 1
        return OracleStrategy(staleness_of(case, versions), lag, machine.torch_device)

    return _Ranks(machine, make)


@contextmanager
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_ranks() -> Iterator[None]:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PL_GLOBAL_SEED")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def begin_on_one_device(case: Case, folder: str, machine: Machine = ON_CPU) -> None:
    """Runs the part of a case that is resumed by another run.

    Args:
        case: The case.
        folder: Where to write checkpoints.
        machine: What has the device.
    """
    with _without_ranks(), _quiet():
        _begin(case, folder, _make_reference(case, machine))


def _begin(case: Case, folder: str, ranks: _Ranks) -> None:
    trainer, _ = _fit(case, Observation(), folder, ranks, until=case.resume_at)
    if not case.goes_on:
        trainer.save_checkpoint(os.path.join(folder, HANDOVER))


def _run(case: Case, folder: str, ranks: _Ranks) -> Observation:
    seen = Observation()
    with _quiet():
        try:
            if case.resume_at is not None and not case.begun_by_one_device:
                _begin(case, folder, ranks)
            resumed = None if case.resume_at is None else os.path.join(folder, HANDOVER)
            trainer, task = _fit(case, seen, folder, ranks, resumed)
        except ValueError as error:
            seen.refusal = f"{type(error).__name__}: {error}"
            return seen
    seen.outputs = task.outputs
    seen.growth = _growth(task.blocks)
    seen.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    seen.progress.update(_progress(trainer, folder))
    if case.evaluates:
        with _quiet():
            _evaluate(case, seen, trainer, task)
    return seen


def _fit(
    case: Case,
    seen: Observation,
    folder: str,
    ranks: _Ranks,
    resumed: str | None = None,
    until: int | None = None,
) -> tuple[L.Trainer, Task]:
    events = seen.events
    kind = recording(Task, MODULE_HOOKS, "module", events) if case.hooks else Task
    task = make_task(case, kind, seed=7 if resumed is None else 8)
    trainer = _make_trainer(case, seen, folder, ranks, until)
    place = _place(trainer, case) if ranks.count > 1 else Place()
    torch.manual_seed(100 + trainer.global_rank)  # as good as no seed
    data = Loaders(case, place, events if case.data_module else [])
    loaders: dict[str, Any] = {"datamodule": data}
    validation = loaders
    if not case.data_module:
        validation = {"dataloaders": data.val_dataloader()}
        loaders = {
            "train_dataloaders": data.train_dataloader(),
            "val_dataloaders": validation["dataloaders"],
        }
    if case.lr_find and resumed is None:
        seen.progress["lr_find"] = _find_rate(trainer, task, loaders)
        seen.rows.clear()
        events.clear()
    if case.validates_first:
        trainer.validate(task, **validation, verbose=False)
    trainer.fit(task, **loaders, ckpt_path=resumed, weights_only=False)
    if until is not None or case.fits == "once":
        return trainer, task
    if case.fits == "anew":
        trainer = _make_trainer(case, seen, folder, ranks)
    else:
        trainer.fit_loop.max_epochs += case.epochs  # type: ignore[operator]
    trainer.fit(task, **loaders)
    return trainer, task


def _make_trainer(
    case: Case,
    seen: Observation,
    folder: str,
    ranks: _Ranks,
    until: int | None = None,
) -> L.Trainer:
    strategy = ranks.make()
    watch = recording(L.Callback, CALLBACK_HOOKS, "callback", seen.events)()
    first: list[L.Callback] = [CatchUp(strategy)] if isinstance(strategy, OracleStrategy) else []
    half = [MixedPrecision()] if case.precision == "half" else []
    clip = case.clip if case.clip is not None and case.clip[0] != "by_hand" else None
    if until is not None and case.goes_on:
        first.append(SaveAtStep(until, os.path.join(folder, HANDOVER)))
        until = None
    limits = [limit for limit in (case.max_steps, until) if limit is not None]
    arguments: dict[str, Any] = {
        **ranks.machine.trainer_options(ranks.count),
        "strategy": strategy,
        "precision": "32-true" if case.precision in ("double", "half") else case.precision,
        "logger": MemoryLogger(seen.rows),
        "callbacks": [*first, *half, *make_callbacks(case.callbacks, folder), watch],
        "enable_checkpointing": any(name in WRITING for name in case.callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": case.sanity_steps,
        "default_root_dir": folder,
        "max_epochs": case.epochs,
        "max_steps": min(limits) if limits else -1,
        "check_val_every_n_epoch": case.check_val_every_n_epoch,
        "reload_dataloaders_every_n_epochs": case.reload_every_n_epochs,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": None if clip is None else clip[1],
        "gradient_clip_algorithm": None if clip is None else clip[0],
        "val_check_interval": case.val_check_interval,
        "limit_train_batches": case.limit_train_batches,
        "limit_val_batches": case.limit_val_batches,
        "log_every_n_steps": case.log_every_n_steps,
    }
    for name in case.options:
        arguments |= TRAINER_OPTIONS[name]
    return L.Trainer(**arguments)


def _evaluate(case: Case, seen: Observation, trainer: L.Trainer, task: Task) -> None:
    place = _place(trainer, case) if trainer.world_size > 1 else Place()
    loader = make_validation_loader(case, place)
    best = ("last" if case.epochs > 1 else "best") if "best" in case.callbacks else None
    trainer.test(task, loader, ckpt_path=best, verbose=False, weights_only=False)
    seen.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(task, loader)
    assert predicted is not None
    seen.predictions = [rows.cpu() for rows in predicted if isinstance(rows, Tensor)]


def _place(trainer: L.Trainer, case: Case) -> Place:
    place = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    assert place["num_replicas"] == STRATEGIES[case.strategy].replicas
    return Place(place["num_replicas"], place["rank"])


def _find_rate(trainer: L.Trainer, task: Task, loaders: Any) -> dict[str, Any]:
    finder = Tuner(trainer).lr_find(
        task,
        **loaders,
        min_lr=1e-4,
        max_lr=0.5,
        num_training=6,
        early_stop_threshold=None,
        # Where losses are known later, another rate is suggested.
        update_attr=STRATEGIES[task.case.strategy].versions is None,
    )
    assert finder is not None
    losses = [float(loss) for loss in finder.results["loss"]]
    rates = [float(rate) for rate in finder.results["lr"]]
    task.outputs.clear()
    return {"losses": losses, "rates": rates, "suggestion": finder.suggestion(0, 0)}


def _progress(trainer: L.Trainer, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "state": str(trainer.state.status),
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            path = callback.best_model_path or folder
            found[f"best {callback.state_key}"] = os.path.relpath(path, folder)
        if isinstance(callback, EarlyStopping):
            found[f"stopped {callback.state_key}"] = callback.stopped_epoch
    return found


def _growth(blocks: list[int]) -> float:
    """Gives how much more memory each batch leaves behind, where there are enough to tell."""
    later = blocks[len(blocks) // 2 :]
    steps = [after - before for before, after in pairwise(later)]
    return float(median(steps)) if len(steps) >= ENOUGH_BATCHES else 0.0

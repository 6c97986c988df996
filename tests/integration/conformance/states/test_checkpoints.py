"""What one strategy saves every other resumes, and goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist.checkpoint import load_full
from tests.helpers.networks.foreach import foreach_by_default
from tests.helpers.networks.models import make_module, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    STEPS_OF_AN_EPOCH,
    TOLERANCE,
    Synced,
    assert_close,
    joined,
    loaders_of,
    trainer_of,
)
from tests.integration.conformance.strategies import EIGHT, ENTRIES

SINGLE = "one device"
LAYOUTS = {**ENTRIES, **EIGHT}


def train(
    name: str, epochs: int, resume: str | None, save: str | None
) -> tuple[dict[str, Tensor], list[float]]:
    """Gives the parameters in the end, and the loss of each step."""
    module = make_module(Synced, optimizer="adamw", schedule_lr=True)
    trainer, entry = trainer_of(None if name == SINGLE else name, max_epochs=epochs)
    losses: list[float] = []

    def keep_loss(*_: Any) -> None:
        losses.append(float(trainer.callback_metrics["train_loss_step"]))

    module.on_train_batch_end = keep_loss
    loaders = loaders_of(trainer, entry)
    with nullcontext() if name == SINGLE else foreach_by_default():  # as on a GPU
        trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module), losses


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # a single device's trainer reads it


@cache
def uninterrupted() -> tuple[dict[str, Tensor], list[float]]:
    return train(SINGLE, 2, None, None)


@pytest.fixture(scope="module")
def saved_by(
    workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Gives what a layout saves after an epoch."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def save(name: str) -> Path:
        path = folder / f"{name}.ckpt"
        if name == SINGLE:
            train(name, 1, None, str(path))
        else:
            workers.run(LAYOUTS[name].devices, train, name, 1, None, str(path))
        return path

    return save


PAIRS = [
    ("ddp-2", "pipeline-gpipe-2"),
    ("fsdp-4", "tp-2"),
    ("shard-2-tp-2", "pp-2-shard-2"),
    ("pp-2-tp-2", "ddp-4"),
    ("pipeline-1f1b-4", "fsdp-2x2"),
    ("ddp-2-static", "ddp-2-buckets"),
    ("fsdp-2-microsteps", "fsdp-2-recompute"),
    ("server-2", "fsdp-2"),
]
# Their layouts differ from those above in sizes only, are one device's, or are found in seconds.
LONG_PAIRS = [
    ("server-2", "auto-2"),
    ("pipeline-2x2", SINGLE),
    ("tp-2x2", "fsdp-2"),
    ("ddp-2-topk", "ddp-2-diloco"),
    ("pp-2-replicate-2", "server-2"),
    ("replicate-2", "fsdp-2"),
]


@pytest.mark.some(*("-".join(pair) for pair in PAIRS))
@pytest.mark.parametrize(("before", "after"), list(permutations([SINGLE, *LAYOUTS], 2)))
def test_resumes_under_any_other(
    workers: WorkerPool,
    saved_by: Callable[[str], Path],
    before: str,
    after: str,
    tmp_path: Path,
) -> None:
    path = saved_by(before)
    if after == SINGLE:
        whole = load_full(path)
        path = tmp_path / "whole.ckpt"
        torch.save(whole, path)
        ranks = [train(after, 2, str(path), None)]
    else:
        ranks = workers.run(LAYOUTS[after].devices, train, after, 2, str(path), None)
    state, losses = uninterrupted()
    for _, resumed in ranks:
        assert resumed == pytest.approx(losses[STEPS_OF_AN_EPOCH:], abs=TOLERANCE)
    assert_close(joined([own for own, _ in ranks]), state)


def test_each_layout_saves_or_resumes() -> None:
    assert {name for pair in PAIRS + LONG_PAIRS for name in pair} == {SINGLE, *ENTRIES}
    assert len(uninterrupted()[1]) == 2 * STEPS_OF_AN_EPOCH

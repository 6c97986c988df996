"""What one strategy saves every other resumes, and goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint import load_full
from tests.helpers.models import make_module, state_of
from tests.helpers.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined, share, trainer_of
from tests.integration.conformance.strategies import ENTRIES

SINGLE = "one device"


def train(name: str, epochs: int, resume: str | None, save: str | None) -> Any:
    module = make_module(Synced, optimizer="adamw", schedule_lr=True)
    trainer, entry = trainer_of(None if name == SINGLE else name, max_epochs=epochs)
    loaders = share(trainer, entry, 44), share(trainer, entry, 24)
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


def run(workers: WorkerPool, name: str, *args: Any) -> dict[str, torch.Tensor]:
    if name == SINGLE:
        return train(name, *args)
    return joined(workers.run(ENTRIES[name].devices, train, name, *args))


PAIRS = [
    (SINGLE, "ddp-4"),
    (SINGLE, "fsdp-2"),
    (SINGLE, "pipeline-gpipe-2"),
    ("ddp-2", SINGLE),
    ("ddp-2", "ddp-4"),
    ("ddp-2", "fsdp-2x2"),
    ("ddp-2", "pipeline-gpipe-2"),
    ("pipeline-2x2", SINGLE),
    ("pipeline-2x2", "ddp-2"),
    ("pipeline-2x2", "fsdp-4"),
    ("fsdp-4", SINGLE),
    ("fsdp-4", "ddp-2"),
    ("fsdp-4", "fsdp-2"),
    ("fsdp-4", "fsdp-2x2"),
    ("fsdp-4", "pipeline-gpipe-2"),
    ("fsdp-2x2", "fsdp-4"),
    ("fsdp-4", "tp-2"),
    ("tp-2x2", SINGLE),
    ("tp-2x2", "fsdp-2"),
    ("tp-2", "tp-2x2"),
    ("shard-2-tp-2", SINGLE),
    ("pipeline-2x2", "shard-2-tp-2"),
    ("pp-2-shard-2", SINGLE),
    ("pp-2-shard-2", "tp-2"),
    ("shard-2-tp-2", "pp-2-shard-2"),
    ("pp-2-tp-2", "ddp-2"),
    ("fsdp-2", "pp-2-tp-2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resumes_under_any_other(
    workers: WorkerPool,
    before: str,
    after: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "middle.ckpt"
    run(workers, before, 1, None, str(path))
    if after == SINGLE:
        whole = load_full(path)
        path = tmp_path / "whole.ckpt"
        torch.save(whole, path)
    resumed = run(workers, after, 2, str(path), None)
    assert_close(resumed, train(SINGLE, 2, None, None))

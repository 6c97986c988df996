"""Ranks save together to a store without a rename, and any layout goes on from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist import FSDPStrategy, PipelineStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.object_store import SCHEME
from tests.helpers.processes.workers import WorkerPool

STRATEGIES = {
    "pipedream": partial(PipelineStrategy, schedule="pipedream"),
    "fsdp": FSDPStrategy,
    "async": partial(FSDPStrategy, async_save=True),
}


def fit(name: str, epochs: int, saver: ModelCheckpoint, **options: Any) -> dict[str, Tensor]:
    trainer = make_trainer(
        strategy=STRATEGIES[name](),
        devices=2,
        max_epochs=epochs,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    module = make_module(depth=2)
    trainer.fit(module, make_loader(8), make_loader(8), **options)
    return state_of(module)


def save_and_resume(name: str, other: str, url: str) -> tuple[dict[str, Tensor], ...]:
    """Gives the weights of a whole run, and those of one that another strategy has ended."""
    make_saver = partial(ModelCheckpoint, url, filename="{epoch}", monitor="epoch", mode="max")
    saver = make_saver()
    fit(name, 2, saver)
    resumed = fit(other, 3, make_saver(), ckpt_path=saver.best_model_path, weights_only=True)
    return fit(name, 3, ModelCheckpoint(f"{url}/whole")), resumed


@pytest.mark.parametrize(("name", "other"), [("async", "fsdp"), ("pipedream", "pipedream")])
def test_a_run_goes_on_from_a_url(
    workers: WorkerPool, tmp_path: Path, name: str, other: str
) -> None:
    ranks = workers.run(2, save_and_resume, name, other, f"{SCHEME}://{tmp_path}")
    for whole, resumed in ranks:
        for parameter, value in whole.items():
            assert torch.equal(resumed[parameter], value), parameter
    # Each epoch's checkpoint was removed when the next one was better.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2.ckpt", "whole"]


def save_where_each_has_a_store(url: str) -> str:
    trainer = make_trainer(strategy=FSDPStrategy(), devices=2)
    trainer.fit(make_module(depth=2), make_loader(8), make_loader(8))
    with pytest.raises(ValueError, match="would be torn") as caught:
        trainer.save_checkpoint(url)
    trainer.strategy.barrier()
    return str(caught.value)


@pytest.mark.long  # waits 5 seconds for a file that does not come
def test_memory_is_no_store_of_several_processes(workers: WorkerPool) -> None:
    first, second = workers.run(2, save_where_each_has_a_store, "memory://bucket/some.ckpt")
    assert first == second
    assert "rank 1 (host " in first

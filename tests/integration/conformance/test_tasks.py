"""One trainer used several times, and what it saves, equal a single device's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.helpers.networks.models import make_module, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import (
    TOLERANCE,
    Synced,
    assert_close,
    joined,
    loaders_of,
    make_trainer,
)
from tests.integration.conformance.strategies import ENTRIES, TYPICAL


class InDouble(Synced):
    """Is in double precision however it is built."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.double()


def fit_test_fit(name: str | None, directory: str) -> Any:
    entry = ENTRIES[name] if name else None
    best = ModelCheckpoint(directory, "{epoch}", monitor="val_loss")
    trainer = make_trainer(
        devices=entry.devices if entry else 1,
        strategy=partial(entry.make, save_full=True)() if entry else "auto",
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val_loss", patience=1)],
        max_epochs=9,
    )
    module = make_module(InDouble, optimizer="adamw")
    loaders = loaders_of(trainer, entry)
    trainer.fit(module, *loaders)
    stopped = trainer.current_epoch
    (tested,) = trainer.test(module, loaders[1], ckpt_path="best", verbose=False, weights_only=True)
    trainer.should_stop = False
    trainer.fit_loop.max_epochs = stopped + 1
    trainer.fit(module, *loaders)
    last = Path(directory) / "last.ckpt"
    trainer.save_checkpoint(last)
    summary = Path(best.best_model_path).name, stopped, trainer.global_step
    return state_of(module), tested, summary


@pytest.mark.some("pipeline-gpipe-2")
@pytest.mark.parametrize("name", TYPICAL)
def test_equals_a_single_device(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, tested, summary = fit_test_fit(None, str(tmp_path / "single"))
    assert summary[1] < 9, "it must have stopped early"
    ranks = workers.run(ENTRIES[name].devices, fit_test_fit, name, str(tmp_path / "many"))
    for _, found, other in ranks:
        assert found == pytest.approx(tested, abs=TOLERANCE)
        assert other == summary
    assert_close(joined([rank[0] for rank in ranks]), state)
    loaded = InDouble.load_from_checkpoint(tmp_path / "many" / "last.ckpt", weights_only=True)
    assert_close(state_of(loaded), state)

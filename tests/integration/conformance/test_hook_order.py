"""Hooks of the module and of callbacks are called in a single device's order."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.helpers.networks.models import make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, share, trainer_of
from tests.integration.conformance.strategies import ENTRIES, TYPICAL

OTHER_METHODS = {
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "predict_step",
    "test_step",
    "training_step",
    "validation_step",
}


def public_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value) and name[0] != "_"}


def recording(kind: type, names: set[str], prefix: str) -> type:
    """Makes a subclass that notes the name of each call in ``calls``."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{prefix}.{name}")
            return method(self, *args, **kwargs)

        noted.__signature__ = signature(method)  # by which Lightning knows what a step takes
        return noted

    return type(f"Recording{kind.__name__}", (kind,), {name: noting(name) for name in names})


HOOKS = {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in public_methods(kind)}
# The loaders are the trainer's; the last is an old name of `configure_model`.
ELSEWHERE = {name for name in HOOKS if name.endswith("_dataloader")} | {"configure_sharded_model"}
MODULE_METHODS = (HOOKS | OTHER_METHODS) - ELSEWHERE
CALLBACK_METHODS = public_methods(L.Callback)


def record(name: str | None, path: str) -> dict[str, list[str]]:
    """Gives the calls of each task."""
    calls: list[str] = []
    module = make_module(recording(Synced, MODULE_METHODS, "module"), schedule_lr=True)
    callback = recording(L.Callback, CALLBACK_METHODS, "callback")()
    module.calls = callback.calls = calls
    trainer, entry = trainer_of(
        name,
        callbacks=[callback],
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        num_sanity_val_steps=1,
        val_check_interval=3,
    )
    trainer.fit(module, share(trainer, entry, 44), share(trainer, entry, 24))
    recorded = {"fit": list(calls)}
    calls.clear()
    trainer.save_checkpoint(path)
    recorded["save"] = list(calls)
    for task in ("validate", "test", "predict"):
        calls.clear()
        getattr(trainer, task)(module, share(trainer, entry, 24))
        recorded[task] = list(calls)
    return recorded


def record_resumed(name: str | None, path: str) -> list[str]:
    """Gives the calls of a fit from a checkpoint, up to its first step."""
    calls: list[str] = []
    module = make_module(recording(Synced, MODULE_METHODS, "module"), schedule_lr=True)
    callback = recording(L.Callback, CALLBACK_METHODS, "callback")()
    module.calls = callback.calls = calls
    trainer, entry = trainer_of(name, callbacks=[callback], max_epochs=3)
    loaders = share(trainer, entry, 44), share(trainer, entry, 24)
    trainer.fit(module, *loaders, ckpt_path=path, weights_only=True)
    return calls[: calls.index("module.training_step")]


def as_of_a_pipeline(calls: list[str]) -> list[str]:
    """Takes out of a single device's calls what a pipeline cannot have.

    It runs a step once per micro-batch, and the backwards between them: ``backward`` is not called
    (docs/limits.md).
    """
    return [call for call in calls if call != "module.backward"]


def once(calls: list[str]) -> list[str]:
    """Leaves one call per batch of a step that runs per micro-batch."""
    pairs = zip(calls, ["", *calls], strict=False)
    return [call for call, before in pairs if call != before or not call.endswith("_step")]


@pytest.mark.some("ddp-2", "pipeline-gpipe-2")
@pytest.mark.parametrize("name", [*TYPICAL, "ddp-2-static"])
def test_equals_a_single_device(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = record(None, str(tmp_path / "single.ckpt"))
    names = {call for calls in expected.values() for call in calls}
    assert len(names) > 90, "most hooks must have been called"
    ranks = workers.run(ENTRIES[name].devices, record, name, str(tmp_path / "many.ckpt"))
    for rank, found in enumerate(ranks):
        for task, calls in expected.items():
            if rank > 0:  # Lightning prepares data on one process of each host
                calls = [call for call in calls if call != "module.prepare_data"]
            if name.startswith(("pipeline", "pp")):
                assert once(found[task]) == as_of_a_pipeline(calls), task
            else:
                assert found[task] == calls, task


@pytest.mark.some("ddp-2", "pipeline-gpipe-2")
@pytest.mark.parametrize("name", TYPICAL)
def test_resumes_as_a_single_device_does(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    record(None, str(tmp_path / "single.ckpt"))
    expected = record_resumed(None, str(tmp_path / "single.ckpt"))
    hooks = ("module.on_load_checkpoint", "module.configure_optimizers", "callback.on_fit_start")
    assert [call for call in expected if call in hooks] == list(hooks)
    single = str(tmp_path / "single.ckpt")
    for calls in workers.run(ENTRIES[name].devices, record_resumed, name, single):
        assert [call for call in calls if call != "module.prepare_data"] == [
            call for call in expected if call != "module.prepare_data"
        ]

"""Averages of weights under each strategy are those of a single device, and of the formula."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dist import DDPStrategy, ParameterServerStrategy, PipelineStrategy
from lightning_dist.callbacks import ShardedWeightAveraging
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.foreach import foreach_by_default
from tests.helpers.networks.models import (
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
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
from tests.integration.conformance.strategies import ENTRIES

DECAY = 0.8


class Kept(Synced):
    """Keeps the weights behind each step, as the optimizer left them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.history: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(state_of(self))


def fit(name: str | None, epochs: int, resume: str | None, save: str | None) -> Any:
    module = make_module(Kept, optimizer="adamw")
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    trainer, entry = trainer_of(name, max_epochs=epochs, callbacks=[averaging])
    if save is not None:
        module.on_train_epoch_end = lambda: trainer.save_checkpoint(f"{save}.epoch")
    loaders = loaders_of(trainer, entry)
    with nullcontext() if name is None else foreach_by_default():  # as on a GPU
        trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val")}
    return state_of(module), metrics, module.history


def averaged(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    average = history[2]
    for weights in history[3:]:
        average = {n: DECAY * a + (1 - DECAY) * weights[n] for n, a in average.items()}
    return average


def test_follows_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, _, history = fit(None, 2, None, None)
    assert_close(state, averaged(history))
    assert any(not torch.allclose(state[n], history[-1][n]) for n in state)


@pytest.mark.some("pipeline-gpipe-2")
@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2x2", "pipeline-gpipe-2", "tp-2"])
def test_equals_a_single_device_when_resumed_too(
    workers: WorkerPool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, metrics, history = fit(None, 2, None, None)
    path = tmp_path / "middle.ckpt"
    workers.run(ENTRIES[name].devices, fit, name, 1, None, str(path))
    for saved in (load_full(path), load_full(f"{path}.epoch")):
        assert_close(saved["state_dict"], averaged(history[:STEPS_OF_AN_EPOCH]))
        assert_close(saved["current_model_state"], history[STEPS_OF_AN_EPOCH - 1])
    ranks = workers.run(ENTRIES[name].devices, fit, name, 2, str(path), None)
    for _, found, _ in ranks:
        assert found == pytest.approx(metrics, abs=TOLERANCE)
    assert_close(joined([rank[0] for rank in ranks]), state)


def test_a_checkpoint_of_the_end_has_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module = make_module(Kept, optimizer="adamw")
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    last = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1000)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [averaging, last]}
    trainer, entry = trainer_of(None, **options)
    trainer.fit(module, *loaders_of(trainer, entry))
    saved = load_full(tmp_path / "last.ckpt")
    assert_close(saved["state_dict"], averaged(module.history))
    assert_close(saved["current_model_state"], module.history[-1])
    assert saved["callbacks"]["ShardedWeightAveraging"] == {"num_updates": 1}

    trainer.validate(module, loaders_of(trainer, entry)[1])
    assert_close(state_of(module), averaged(module.history))
    trainer.save_checkpoint(tmp_path / "validated.ckpt")
    resumed, _ = trainer_of(None, max_epochs=2, **options)
    with pytest.warns(UserWarning, match="averaged weights, and not the latest ones"):
        resumed.fit(module, *loaders_of(trainer, entry), ckpt_path=tmp_path / "validated.ckpt")


def test_another_module_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    for factor in (1.0, 2.0):
        module = make_module(Kept, optimizer="adamw")
        for parameter in module.parameters():
            parameter.data.mul_(factor)
        trainer, entry = trainer_of(None, max_epochs=2, callbacks=[averaging])
        trainer.fit(module, *loaders_of(trainer, entry))
        assert_close(state_of(module), averaged(module.history))


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("in the midst of it")


def test_a_module_after_a_run_that_failed_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    failing, entry = trainer_of(None, max_epochs=2, callbacks=[averaging, Stops()])
    module = make_module(Kept, optimizer="adamw")
    for parameter in module.parameters():
        parameter.data.mul_(2.0)
    with pytest.raises(RuntimeError, match="in the midst of it"):
        failing.fit(module, *loaders_of(failing, entry))
    trainer, entry = trainer_of(None, max_epochs=2, callbacks=[averaging])
    module = make_module(Kept, optimizer="adamw")
    trainer.fit(module, *loaders_of(trainer, entry))
    assert_close(state_of(module), averaged(module.history))


class KeptUpdates(Kept):
    """Keeps the weights behind each update of this rank's stage, and what validations see."""

    def on_train_start(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda *_: self.history.append(state_of(self)))

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_validation_epoch_start(self) -> None:
        self.seen.append(state_of(self))


def fit_late() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Tensor]]:
    module = make_module(KeptUpdates, optimizer="adamw")
    strategy = PipelineStrategy(schedule="pipedream")
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    trainer = make_trainer(devices=3, strategy=strategy, max_epochs=2, callbacks=[averaging])
    trainer.fit(module, make_loader(48), make_loader(8))
    return module.history, module.seen, state_of(module)


def test_stages_of_an_asynchronous_schedule_average_at_their_own_updates(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for history, seen, state in workers.run(3, fit_late):
        assert len(history) == 12
        assert_close(seen[0], averaged(history[:6]))
        assert_close(seen[1], averaged(history))
        assert_close(state, averaged(history))


class SavesWhatFails(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class FailsInSecondValidation(Kept):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1:
            raise RuntimeError("in the midst of it")
        super().validation_step(batch, batch_idx)


def test_a_validation_that_fails_leaves_the_latest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module = make_module(FailsInSecondValidation, optimizer="adamw")
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    path = tmp_path / "failed.ckpt"
    callbacks = [averaging, SavesWhatFails(path)]
    trainer, entry = trainer_of(None, max_epochs=2, callbacks=callbacks)
    with pytest.raises(RuntimeError, match="in the midst of it"):
        trainer.fit(module, *loaders_of(trainer, entry))
    assert_close(state_of(module), module.history[-1])
    assert_close(averaging.averages, averaged(module.history))
    saved = load_full(path)
    assert_close(saved["state_dict"], averaged(module.history))
    assert_close(saved["current_model_state"], module.history[-1])


def test_averages_follow_the_module_to_its_device() -> None:
    averaging, module = ShardedWeightAveraging(), make_module(Synced)
    trainer: Any = SimpleNamespace(global_step=0, strategy=None, world_size=1)
    averaging.on_train_start(trainer, module)
    assert {average.device.type for average in averaging._averages.values()} == {"cpu"}
    averaging.on_train_start(trainer, module.to("meta"))
    assert {average.device.type for average in averaging._averages.values()} == {"meta"}


@pytest.mark.parametrize("arguments", [{"decay": 1.0}, {"every_n_steps": 0}, {"start_at_step": -1}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ShardedWeightAveraging(**arguments)


def test_a_tied_parameter_is_averaged_under_each_name() -> None:
    module = L.LightningModule()
    module.first, module.last = nn.Linear(2, 2), nn.Linear(2, 2)
    module.last.weight = module.first.weight
    trainer: Any = SimpleNamespace(global_step=0, strategy=None, world_size=1)
    averaging = ShardedWeightAveraging(decay=0.5)
    averaging.on_train_start(trainer, module)
    for step, value in enumerate((2.0, 4.0)):
        nn.init.constant_(module.first.weight, value)
        trainer.global_step = step + 1
        averaging.on_train_batch_end(trainer, module, None, None, step)
    checkpoint = {"state_dict": module.state_dict()}
    averaging.on_save_checkpoint(trainer, module, checkpoint)
    for name in ("first.weight", "last.weight"):
        assert bool((checkpoint["state_dict"][name] == 3.0).all())
        assert bool((checkpoint["current_model_state"][name] == 4.0).all())


@pytest.mark.parametrize("has_averaged", [False, True])
def test_layers_may_move_before_the_first_average_only(has_averaged: bool) -> None:
    averaging, module = ShardedWeightAveraging(start_at_step=1), make_module(Synced)
    trainer: Any = SimpleNamespace(global_step=0, strategy=None, world_size=1)
    averaging.on_train_start(trainer, module)

    def step() -> None:
        trainer.global_step += 1
        averaging.on_train_batch_end(trainer, module, None, None, 0)

    step()
    if has_averaged:
        step()
    module.model[0] = torch.nn.Identity()
    if not has_averaged:
        step()
        assert averaging.averages.keys() == dict(module.named_parameters()).keys()
        return
    for at_next in (step, lambda: averaging.on_validation_start(trainer, module)):
        with pytest.raises(ValueError, match="This rank has other layers than before"):
            at_next()


class CallsItself(Kept):
    """Calls its model in the hooks around a validation, and keeps what it gives."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Tensor] = []

    def _call(self) -> None:
        with torch.no_grad():
            self.seen.append(self.model(make_data(4).tensors[0]))

    def on_validation_start(self) -> None:
        self._call()

    def on_validation_epoch_end(self) -> None:
        self._call()


def fit_calling(name: str | None) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    module = make_module(CallsItself)
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    trainer, entry = trainer_of(name, max_epochs=2, callbacks=[averaging])
    trainer.fit(module, *loaders_of(trainer, entry))
    return module.seen, state_of(module), module.history


def test_hooks_around_a_validation_see_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    seen, _, history = fit_calling(None)
    module = make_module(Synced)
    for epoch in range(2):
        module.load_state_dict(averaged(history[: STEPS_OF_AN_EPOCH * (epoch + 1)]))
        expected = module.model(make_data(4).tensors[0]).detach()
        for at_start_or_end in seen[2 * epoch : 2 * epoch + 2]:
            assert float((at_start_or_end - expected).abs().max()) < TOLERANCE


@pytest.mark.some("pipeline-gpipe-2")
@pytest.mark.parametrize("name", ["fsdp-2", "pipeline-gpipe-2"])
def test_a_model_that_is_called_at_its_end_trains_on_with_the_latest_weights(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, state, _ = fit_calling(None)
    ranks = workers.run(2, fit_calling, name)
    for seen, _, _ in ranks:
        for found, value in zip(seen, expected, strict=True):
            assert float((found - value).abs().max()) < TOLERANCE
    assert_close(joined([own for _, own, _ in ranks]), state)


class SavesInValidation(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_of_a_validation_has_the_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module, path = make_module(Kept, optimizer="adamw"), tmp_path / "some.ckpt"
    averaging = ShardedWeightAveraging(DECAY, start_at_step=2)
    callbacks = [averaging, SavesInValidation(path)]
    trainer, entry = trainer_of(None, max_epochs=2, callbacks=callbacks)
    trainer.fit(module, *loaders_of(trainer, entry))
    saved = load_full(path)
    assert_close(saved["state_dict"], averaged(module.history))
    assert_close(saved["current_model_state"], module.history[-1])


def test_integers_are_not_averaged() -> None:
    module = L.LightningModule()
    for name, dtype in (("real", torch.float64), ("complex", torch.complex128)):
        setattr(module, name, nn.Parameter(torch.zeros(2, dtype=dtype)))
    for name, kind in (("codes", torch.int8), ("flags", torch.bool)):
        value = nn.Parameter(torch.zeros(2, dtype=kind), requires_grad=False)
        setattr(module, name, value)
    trainer: Any = SimpleNamespace(global_step=0, strategy=None, world_size=1)
    averaging = ShardedWeightAveraging(decay=0.5)
    averaging.on_train_start(trainer, module)
    for step in (1, 2):
        for parameter in module.parameters():
            parameter.data.fill_(step)
        trainer.global_step = step
        averaging.on_train_batch_end(trainer, module, None, None, step)
    found = {name: average.tolist() for name, average in averaging.averages.items()}
    assert found == {"real": [1.5] * 2, "complex": [1.5] * 2, "codes": [2] * 2, "flags": [True] * 2}


def test_steps_that_are_counted_by_several_are_averaged() -> None:
    """With two optimizers each batch has two steps, and some multiples are never met."""
    module = L.LightningModule()
    module.weight = nn.Parameter(torch.zeros(1))
    trainer: Any = SimpleNamespace(global_step=0, strategy=None, world_size=1)
    averaging = ShardedWeightAveraging(decay=0.5, every_n_steps=2, start_at_step=1)
    averaging.on_train_start(trainer, module)
    found = []
    for batch in range(4):
        trainer.global_step += 2
        module.weight.data.fill_(batch)
        averaging.on_train_batch_end(trainer, module, None, None, batch)
        found += [float(average) for average in averaging.averages.values()]
    assert found == [1.0, 1.5, 2.25]  # behind the steps 4, 6 and 8, as 3, 5 and 7 were met


def test_replicas_that_step_on_their_own_are_refused() -> None:
    averaging, module = ShardedWeightAveraging(), make_module(Synced)
    with pytest.raises(ValueError, match="sync_every=4.*sync_every=1"):
        averaging.setup(make_trainer(strategy=DDPStrategy(sync_every=4)), module, "fit")
    trainer = make_trainer(devices=1, strategy=ParameterServerStrategy("async"))
    with pytest.raises(ValueError, match="mode='sync'"):
        averaging.setup(trainer, module, "fit")
    averaging.setup(make_trainer(strategy=DDPStrategy()), module, "fit")

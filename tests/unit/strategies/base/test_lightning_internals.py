"""The private names of Lightning and torch that strategies lean on are where they were."""

from __future__ import annotations

import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors import signal_connector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_dist.engine.data_parallel.ddp_options import remove_gradient_hooks
from lightning_dist.strategies.base import lightning_internals


def test_a_module_can_be_told_its_device() -> None:
    module = L.LightningModule()
    module.layer = nn.Linear(1, 1)
    lightning_internals.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert not module.layer.weight.is_meta


def test_a_fit_may_end_early_from_its_least_steps_on() -> None:
    trainer = L.Trainer(logger=False, accelerator="cpu", min_steps=2, barebones=True)
    assert not lightning_internals.can_stop_early(trainer)
    trainer.fit_loop.epoch_loop.min_steps = 0
    assert lightning_internals.can_stop_early(trainer)


def test_a_validation_that_is_due_can_be_put_off() -> None:
    trainer = L.Trainer(
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        val_check_interval="00:00:00:01",
        check_val_every_n_epoch=None,
    )
    assert lightning_internals.validates_by_the_clock(trainer)
    loop = trainer.fit_loop.epoch_loop
    before = dict(vars(loop))
    asked: list[bool] = []
    undo = lightning_internals.change_validation_due(trainer, lambda due: asked.append(due) or True)
    assert loop._should_check_val_fx(None)
    assert asked == [False]  # there is nothing to validate
    undo()
    assert vars(loop) == before


def test_state_that_was_made_early_moves_but_its_counter() -> None:
    optimizer = torch.optim.Adagrad(nn.Linear(2, 2).parameters())
    lightning_internals.move_optimizers([optimizer], torch.device("meta"))
    for state in optimizer.state.values():
        assert state["sum"].is_meta
        assert not state["step"].is_meta


def test_slurms_signal_saves_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer()
    did: list[Any] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(signal_connector, "call", lambda command: did.append(command) or 0)
    monkeypatch.setattr(trainer, "save_checkpoint", did.append)
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda path: f"{path} of rank 0")
    for _ in range(2):  # as two runs of one Trainer do
        on_signal = partial(did.append, "signal")
        finish = partial(did.append, "whole")
        requeue, undo = lightning_internals.replace_requeue(trainer, on_signal, finish)
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert did == ["signal"]
    requeue()
    path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    assert did[1:] == [f"{path} of rank 0", "whole", ["scontrol", "requeue", "7"]]
    undo()


def test_what_comes_out_of_a_step_is_told_from_what_does_not() -> None:
    class Fails(L.LightningModule):
        def training_step(self, batch: Any) -> None:
            raise KeyError("in step")

        def on_train_start(self) -> None:
            if self.at_start:
                raise KeyError("in hook")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    for at_start in (True, False):
        module = Fails()
        module.at_start = at_start
        trainer = L.Trainer(accelerator="cpu", barebones=True, max_steps=1)
        with pytest.raises(KeyError) as caught:
            trainer.fit(module, [torch.ones(1)])
        assert lightning_internals.is_raised_in_step(caught.value) is not at_start


def quiet_trainer() -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_the_sigterm_protocol_is_replaced_where_lightning_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = quiet_trainer()
    monkeypatch.setattr(trainer.strategy, "world_size", 2, raising=False)
    seen: list[str] = []
    lightning_internals.replace_sigterm_protocol(trainer, lambda: seen.append("batch"))
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert seen == ["batch"]
    assert not trainer.received_sigterm
    lightning_internals.set_received_sigterm(trainer)
    assert trainer.received_sigterm


def test_a_single_process_comes_to_batch_boundaries_too() -> None:
    trainer = L.Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    seen: list[str] = []
    undo = lightning_internals.replace_sigterm_protocol(trainer, lambda: seen.append("batch"))
    trainer.fit(Plain(), DataLoader(torch.ones(3, 1)))
    undo()
    assert seen == ["batch"] * 3


def test_accumulated_gradients_are_known_before_the_next_batch() -> None:
    trainer = L.Trainer(accelerator="cpu", barebones=True, max_epochs=2, accumulate_grad_batches=2)
    seen: list[bool] = []
    lightning_internals.replace_sigterm_protocol(
        trainer, lambda: seen.append(lightning_internals.is_in_step(trainer))
    )
    trainer.fit(Plain(), DataLoader(torch.ones(3, 1)))
    assert seen == [False, True, False] * 2


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> Any:
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=1.0)


def test_a_signal_handler_is_restored_to_another() -> None:
    trainer, signals = quiet_trainer(), (signal.SIGTERM, signal.SIGINT)
    connector = trainer._signal_connector
    before = [signal.getsignal(signum) for signum in signals]
    connector.register_signal_handlers()
    lightning_internals.replace_handler_to_restore(trainer, signal.SIGTERM, signal.SIG_IGN)
    connector.teardown()
    after = [signal.getsignal(signum) for signum in signals]
    for signum, handler in zip(signals, before, strict=True):
        signal.signal(signum, handler)
    assert after == [signal.SIG_IGN, before[1]]


def test_hooks_and_clipping_come_between_backward_and_step() -> None:
    class Hooked(L.LightningModule):
        norms: tuple[float, ...] = ()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.norms += (float(self.weight.grad.norm()),)

    trainer, module = quiet_trainer(), Hooked()
    trainer.gradient_clip_val = 1.0
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.weight = nn.Parameter(torch.zeros(4))
    module.weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    lightning_internals.between_backward_and_step(trainer.precision_plugin, module, optimizer)
    assert module.norms == (2.0,)
    assert float(module.weight.grad.norm()) == pytest.approx(1.0, abs=1e-5)
    assert not module.weight.any()


def test_a_late_first_step_is_no_reason_for_a_warning() -> None:
    def step_scheduler(prepare: bool) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if prepare:
            lightning_internals.mark_optimizer_called(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()

    step_scheduler(prepare=True)
    with pytest.raises(UserWarning, match="lr_scheduler.step"):
        step_scheduler(prepare=False)


def test_a_metrics_step_value_is_where_lightning_reads_it() -> None:
    metric = MeanMetric()
    metric(torch.tensor(3.0))
    assert float(lightning_internals.step_value(metric)) == 3.0
    lightning_internals.set_step_value(metric, torch.tensor(4.0))
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultMetric,
        _Sync,
    )

    meta = _Metadata("training_step", "x", on_step=True)
    meta.sync = _Sync()
    result = _ResultMetric(meta, is_tensor=False)
    result.forward(metric, 1)
    assert float(result._forward_cache) == 4.0


def test_a_wrapper_that_is_taken_off_leaves_its_parameters_alone() -> None:
    heard: list[str] = []

    def hear(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        heard.append("gradients")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        layer = nn.Linear(2, 1)
        ddp = nn.parallel.DistributedDataParallel(layer)
        ddp.register_comm_hook(None, lambda _, bucket: hear(bucket))
        ddp(torch.ones(1, 2)).sum().backward()
        assert heard == ["gradients"]
        remove_gradient_hooks(ddp)
        ddp(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert heard == ["gradients"]


def test_callbacks_and_rank_are_where_lightning_looks() -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    trainer = quiet_trainer()
    extra = L.Callback()
    lightning_internals.set_callbacks(trainer, [*lightning_internals.callbacks_of(trainer), extra])
    assert trainer.callbacks[-1] is extra
    before: Any = rank_zero_only.rank
    try:
        lightning_internals.set_rank_of_rank_zero_functions(3)
        assert rank_zero_only.rank == 3
    finally:
        rank_zero_only.rank = before


@pytest.mark.parametrize("asked", [False, True])
def test_anomaly_detection_is_where_lightning_looks(asked: bool) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        detect_anomaly=asked,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    assert lightning_internals.detects_anomalies(trainer) == asked


def test_links_to_checkpoints_can_be_made_elsewhere(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last="link")
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[save])
    asked: list[tuple[str, str]] = []
    undo = lightning_internals.replace_links(trainer, lambda *paths: asked.append(paths))
    save._last_checkpoint_saved = "some.ckpt"
    save._save_last_checkpoint(trainer, {})
    assert asked == [("some.ckpt", f"{tmp_path}/last.ckpt")]
    assert list(tmp_path.iterdir()) == []
    undo()
    save._save_last_checkpoint(trainer, {})
    assert (tmp_path / "last.ckpt").is_symlink()


def test_the_processes_have_a_store() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        lightning_internals.default_store().set("a", "b")
        assert lightning_internals.default_store().get("a") == b"b"
    finally:
        dist.destroy_process_group()


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", "0"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Keeps none."""


class LogsEarlierSteps(L.LightningModule):
    """Logs the number of each batch, and hands it over as of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        step = max(0, lightning_internals.logged_step(self.trainer) - 1)
        lightning_internals.log_training_step(self.trainer, step, stops=batch_idx == 3)
        return self.weight.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert lightning_internals.hook_of(self) == "on_train_batch_end"
        with lightning_internals.as_of_hook(self, "on_train_batch_start"):
            self.log("beside", float(batch_idx))
        self.seen.append(float(self.trainer.callback_metrics["batch_step"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_values_of_a_step_are_logged_as_of_another_and_once() -> None:
    rows = Rows()
    module = LogsEarlierSteps()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=rows,
        max_epochs=1,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers and validation
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 1))))
    found = [(step, {n: v for n, v in row.items() if n != "epoch"}) for step, row in rows.rows]
    assert found == [
        (1, {"beside": 1.0}),
        (1, {"batch_step": 2.0}),  # each second step, counted from the batch's own
        (2, {"batch_step": 3.0}),  # and the last one
        (3, {"beside": 3.0}),
        (3, {"batch_epoch": 1.5}),
    ]
    assert module.seen == [0.0, 1.0, 2.0, 3.0]

"""The strategy's parts that need no other process, and the private names that they lean on."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_dist
from lightning_dist.rng import seeded
from lightning_dist.strategies import lightning_private
from lightning_dist.strategies.failure_ring import Failure, RankFailedError
from lightning_dist.strategies.signal_handlers import InterruptHandler, SigtermHandler
from lightning_dist.strategies.step_log import StepLog
from lightning_dist.strategies.tensor_checks import check_precision


def test_the_strategies_have_names() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    names = ["pipeline", "pipeline_gpipe", "pipeline_1f1b", "pipeline_pipedream"]
    assert set(names) <= set(StrategyRegistry.available_strategies())
    assert StrategyRegistry.get("pipeline_pipedream").asynchronous
    kinds = ("DDP", "FSDP", "Mesh", "Pipeline", "TensorParallel")
    assert lightning_dist.__all__ == [f"{kind}Strategy" for kind in kinds]


def test_random_numbers_depend_on_their_name_alone() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    undisturbed = torch.rand(3)
    torch.manual_seed(0)
    with seeded(1, 2, device=device):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), undisturbed)
    with seeded(1, 2, device=device):
        assert torch.equal(torch.rand(3), first)
    with seeded(1, 3, device=device):
        assert not torch.equal(torch.rand(3), first)


def test_a_module_can_be_told_its_device() -> None:
    module = L.LightningModule()
    module.layer = nn.Linear(1, 1)
    lightning_private.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert not module.layer.weight.is_meta


def test_a_fit_may_end_early_from_its_least_steps_on() -> None:
    trainer = L.Trainer(logger=False, accelerator="cpu", min_steps=2, barebones=True)
    assert not lightning_private.can_stop_early(trainer)
    trainer.fit_loop.epoch_loop.min_steps = 0
    assert lightning_private.can_stop_early(trainer)


def test_a_validation_that_is_due_can_be_put_off() -> None:
    trainer = L.Trainer(
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        val_check_interval="00:00:00:01",
        check_val_every_n_epoch=None,
    )
    assert lightning_private.validates_by_the_clock(trainer)
    loop = trainer.fit_loop.epoch_loop
    before = dict(vars(loop))
    asked: list[bool] = []
    undo = lightning_private.change_validation_due(trainer, lambda due: asked.append(due) or True)
    assert loop._should_check_val_fx(None)
    assert asked == [False]  # there is nothing to validate
    undo()
    assert vars(loop) == before


def test_state_that_was_made_early_moves_but_its_counter() -> None:
    optimizer = torch.optim.Adagrad(nn.Linear(2, 2).parameters())
    lightning_private.move_optimizers([optimizer], torch.device("meta"))
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
        requeue = lightning_private.replace_requeue(trainer, lambda: did.append("signal"))
    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert did == ["signal"]
    requeue()
    path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    assert did[1:] == [f"{path} of rank 0", ["scontrol", "requeue", "7"]]


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
        assert lightning_private.is_raised_in_step(caught.value) is not at_start


def test_the_second_ctrl_c_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_boundary = False
    try:
        handler = InterruptHandler(quiet_trainer(), lambda: has_boundary)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        has_boundary = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        handler.remove()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class Logging(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_logged_values_are_combined_over_microbatches() -> None:
    module = Logging()
    log = StepLog(module)
    for value, size in ((1.0, 3), (5.0, 1)):
        with log.recording(size):
            module.log("mean", torch.tensor(value), prog_bar=True)
            module.log("sum", value + 0.5, reduce_fx="sum")
            module.log("floating count", value, reduce_fx="sum")
            module.log("max", value, reduce_fx=torch.max)
            module.log("count", torch.tensor(int(value)), reduce_fx=sum)
            module.log("longest", int(value), reduce_fx="MAX")
            module.log("constant", value, batch_size=1)
            module.log("tokens", value, batch_size=torch.tensor(4 - size))
    taken = log.take(4)
    names = ["mean", "sum", "floating count", "max", "count", "longest", "constant", "tokens"]
    assert [call.name for call in taken.calls] == names
    assert taken.values.tolist() == [2.0, 2.5, 6.0, 2.0, 6.0, 5.0, 2.0, 4.0]
    assert [call.batch_size for call in taken.calls[-2:]] == [2, 4]
    assert [call.options["reduce_fx"] for call in taken.calls[2:6]] == ["sum", "max", "sum", "max"]
    assert "log" not in vars(module)
    assert log.take(4).calls == ()


def test_what_a_step_logs_before_it_is_left_is_dropped() -> None:
    module = Logging()
    log = StepLog(module)
    with suppress(InterruptedError), log.recording(2):
        module.log("before", 1.0)
        raise InterruptedError
    assert log.take(2).calls == ()
    with log.recording(2):
        module.log("whole", 1.0)
    assert [call.name for call in log.take(2).calls] == ["whole"]


@pytest.mark.parametrize("reduce_fx", ["median", torch.median, lambda values: values[0]])
def test_a_reduction_that_lightning_does_not_know_is_refused(reduce_fx: Any) -> None:
    module = Logging()
    with StepLog(module).recording(1), pytest.raises(ValueError, match="only 'mean', 'sum'"):
        module.log("x", 1.0, reduce_fx=reduce_fx)


def test_a_tensor_of_several_elements_is_refused() -> None:
    module = Logging()
    log = StepLog(module)
    with log.recording(1), pytest.raises(ValueError, match=r"shape \(2,\)"):
        module.log("x", torch.ones(2))
    with log.recording(1), pytest.raises(ValueError, match="not an attribute"):
        module.log("x", MeanMetric())
    with log.recording(1), pytest.raises(ValueError, match="sync_dist_group"):
        module.log("x", 1.0, sync_dist_group=object())


@pytest.mark.parametrize("value", [None, "loss", [1.0], {"a": {"b": 1.0}}])
def test_what_lightning_does_not_log_is_refused_in_its_words(value: Any) -> None:
    module = Logging()
    log = StepLog(module)
    with log.recording(1), pytest.raises(ValueError, match="cannot be logged|should be"):
        module.log("x", value)


def test_a_failure_becomes_the_same_error_elsewhere() -> None:
    try:
        raise ValueError("bad value\nsecond line")
    except ValueError as error:
        failure = Failure.from_exception(2, error)
    assert str(failure) == "Rank 2 failed first: ValueError: bad value"
    assert isinstance(failure.to_exception(), ValueError)
    error = Failure(1, "KeyError: 'k'", "Traceback ...\n").to_exception()
    assert isinstance(error, RankFailedError)
    assert "Traceback ..." in str(error.__cause__)


# --- private names: each is used here on the real object, so that a rename fails -----------------


def quiet_trainer() -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_the_sigterm_protocol_is_replaced_where_lightning_looks() -> None:
    trainer = quiet_trainer()
    seen: list[str] = []
    lightning_private.replace_sigterm_protocol(trainer, lambda: seen.append("batch"))
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert seen == ["batch"]
    assert not trainer.received_sigterm
    lightning_private.set_received_sigterm(trainer)
    assert trainer.received_sigterm


def test_sigterm_is_ours_before_and_with_lightnings_handlers_and_then_the_users_again() -> None:
    trainer = quiet_trainer()
    ours: list[str] = []
    users: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: users.append("signal"))
    try:
        handler = SigtermHandler(trainer, lambda: ours.append("signal"))
        signal.raise_signal(signal.SIGTERM)
        assert ours == ["signal"]
        lightning_private.replace_sigterm_protocol(trainer, lambda: None)
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        assert ours == ["signal"] * 2
        assert not users
        handler.remove()
        signal.raise_signal(signal.SIGTERM)
        trainer._signal_connector.teardown()
        signal.raise_signal(signal.SIGTERM)
        assert (ours, users) == (["signal"] * 2, ["signal"] * 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_what_was_forked_during_a_run() -> None:
    handler = SigtermHandler(quiet_trainer(), lambda: None)
    try:
        context = multiprocessing.get_context("fork")
        runs = context.Event()  # until it does, Python drops the signals of a forked process
        child = context.Process(target=lambda: (runs.set(), signal.pause()))
        child.start()
        assert runs.wait(10)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
        handler.remove()


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
    lightning_private.between_backward_and_step(trainer.precision_plugin, module, optimizer)
    assert module.norms == (2.0,)
    assert float(module.weight.grad.norm()) == pytest.approx(1.0, abs=1e-5)
    assert not module.weight.any()


def test_a_late_first_step_is_no_reason_for_a_warning() -> None:
    def step_scheduler(prepare: bool) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if prepare:
            lightning_private.mark_optimizer_called(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()

    step_scheduler(prepare=True)
    with pytest.raises(UserWarning, match="lr_scheduler.step"):
        step_scheduler(prepare=False)


def test_a_metrics_step_value_is_where_lightning_reads_it() -> None:
    metric = MeanMetric()
    metric(torch.tensor(3.0))
    assert float(lightning_private.step_value(metric)) == 3.0
    lightning_private.set_step_value(metric, torch.tensor(4.0))
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
        lightning_private.remove_gradient_hooks(ddp)
        ddp(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert heard == ["gradients"]


class Reversed:
    """Gives the entries of a sampler from its end."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(self.sampler))


@pytest.mark.parametrize(
    ("options", "name", "found"),
    [
        ({"batch_size": 2}, "batch_sampler", [[2, 3], [0, 1]]),
        ({"batch_size": None}, "sampler", [3, 2, 1, 0]),
    ],
)
def test_a_copy_of_a_loader_has_another_sampler(
    options: dict[str, Any], name: str, found: list[Any]
) -> None:
    def read(loader: DataLoader[Any]) -> list[Any]:
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]

    loader: DataLoader[Any] = DataLoader(range(4), **options)  # type: ignore[arg-type]
    own, samplers = read(loader), (loader.sampler, loader.batch_sampler)
    copied = lightning_private.copy_of_loader(loader, name, Reversed(getattr(loader, name)))
    assert read(copied) == found
    assert read(loader) == own
    assert (loader.sampler, loader.batch_sampler) == samplers


class Asking:
    """Notes whether Lightning's loops iterate it."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __iter__(self) -> Iterator[Any]:
        self.answers.append(lightning_private.is_iterated_by_loop())
        return iter([0])


def test_a_loader_knows_whether_lightnings_loops_iterate_it() -> None:
    asking = Asking()
    modes = ("min_size", "max_size", "max_size_cycle", "sequential")
    for mode in modes:
        list(CombinedLoader({"a": asking}, mode))  # type: ignore[arg-type]
    assert len(asking.answers) >= len(modes)
    assert all(asking.answers)
    asking.answers.clear()
    list(asking)
    next(iter(asking))
    assert asking.answers == [False, False]


class WithLoaders(L.LightningModule):
    def train_dataloader(self) -> list[str]:
        return ["train"]

    def val_dataloader(self) -> list[str]:
        return ["val"]


def test_loader_hooks_are_wrapped_where_lightning_calls_them() -> None:
    trainer, module = quiet_trainer(), WithLoaders()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    loop = trainer.fit_loop
    sources = [loop._data_source, loop.epoch_loop.val_loop._data_source]
    undo = lightning_private.replace_loader_hooks(trainer, lambda hook: lambda: ["mine", *hook()])
    assert [_request_dataloader(s) for s in sources] == [["mine", "train"], ["mine", "val"]]
    undo()
    assert [_request_dataloader(s) for s in sources] == [["train"], ["val"]]


def test_callbacks_and_rank_are_where_lightning_looks() -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    trainer = quiet_trainer()
    extra = L.Callback()
    lightning_private.set_callbacks(trainer, [*lightning_private.callbacks_of(trainer), extra])
    assert trainer.callbacks[-1] is extra
    before: Any = rank_zero_only.rank
    try:
        lightning_private.set_rank_of_rank_zero_functions(3)
        assert rank_zero_only.rank == 3
    finally:
        rank_zero_only.rank = before


def test_a_trainer_for_the_cpu_is_asked_for_no_fp16() -> None:
    kinds = (lightning_dist.DDPStrategy, lightning_dist.FSDPStrategy)
    for strategy in ("pipeline", *(kind() for kind in kinds)):
        with pytest.raises(ValueError, match=r"'16-mixed' on a CPU: .*'bf16-mixed'.*\('fp16'\)"):
            L.Trainer(accelerator="cpu", devices=2, strategy=strategy, precision="16-mixed")
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False}
        if isinstance(strategy, str):
            assert L.Trainer(**options, strategy=strategy, precision="bf16-mixed")
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):  # not ours
        trainer = L.Trainer(accelerator="cpu", devices=1, precision="16-mixed", logger=False)
    assert trainer.precision == "bf16-mixed"


class Overstated:
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


class Skipping(L.LightningModule):
    """Skips the rest of an epoch, if it is told to."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.found: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.skips and batch_idx == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...

    def on_train_epoch_end(self) -> None:
        self.found.append(lightning_private.batches_read(self.trainer))


@pytest.mark.parametrize(
    ("loader", "skips", "known"),
    [
        (Overstated(), False, (2, 5, True)),
        (range(2), False, (2, 2, True)),
        (range(5), True, (2, 5, False)),
    ],
)
def test_who_reads_a_loader_knows_how_far(
    loader: Any, skips: bool, known: tuple[int, int, bool]
) -> None:
    module, trainer = Skipping(skips), quiet_trainer()
    trainer.fit_loop.max_epochs = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    assert module.found == [known]


def test_the_processes_have_a_store() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        lightning_private.default_store().set("a", "b")
        assert lightning_private.default_store().get("a") == b"b"
    finally:
        dist.destroy_process_group()


def test_tensor_parallel_ranks_have_one_scale() -> None:
    check_precision("16-mixed", 1)
    check_precision("bf16-mixed", 2)
    with pytest.raises(ValueError, match=r"'16-mixed' with tp_size=2.*'bf16-mixed'"):
        check_precision("16-mixed", 2)


def test_only_a_resumed_run_tells_a_sampler_its_epoch_early() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader:
        sampler = Sampler()

    trainer, loader = L.Trainer(accelerator="cpu", logger=False), Loader()
    lightning_private.set_sampler_epoch(trainer, loader)
    assert loader.sampler.epochs == []
    trainer.fit_loop.epoch_progress.current.processed = 2
    lightning_private.set_sampler_epoch(trainer, loader)
    assert loader.sampler.epochs == [2]


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
        step = max(0, lightning_private.logged_step(self.trainer) - 1)
        lightning_private.log_training_step(self.trainer, step, stops=batch_idx == 3)
        return self.weight.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert lightning_private.hook_of(self) == "on_train_batch_end"
        with lightning_private.as_of_hook(self, "on_train_batch_start"):
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

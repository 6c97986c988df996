"""Steps that sleep show what the profiler makes of them, on each kind of strategy."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_dist.callbacks import StageBalancer, StepProfiler
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.profiling.account import Use
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.strategies.base.lightning_internals import profiler_of, set_profiler
from lightning_dist.strategies.base.rank_view import view_of
from tests.helpers.networks.models import Classifier, make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

SLEEP_SECONDS, LOAD_SECONDS, WIDTH, BATCH = 0.004, 0.006, 12, 8
NUM_LAYERS, ACTIVE = 4, 3
LAYER_FLOPS = 2 * BATCH * WIDTH * WIDTH
TRAINED_FLOPS = LAYER_FLOPS * (3 * NUM_LAYERS - 1)  # the first one's input needs no gradient
PARAMETERS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH)


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return self.linear(x)


class Slow(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.model = nn.Sequential(*(Sleepy() for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0].flatten(1))[:, :3], batch[1])


def load(samples: list[Any]) -> Any:
    time.sleep(LOAD_SECONDS)
    return tuple(map(_stack, zip(*samples, strict=True)))


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0].new_tensor([t.tolist() for t in tensors])


def loader() -> DataLoader[Any]:
    return DataLoader(make_data(80), batch_size=BATCH, collate_fn=load)


class Tracing(PyTorchProfiler):
    """Stands for Lightning's, which cannot be thrown away before it has run."""

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


def make(name: str) -> Strategy | str:
    return {
        "1f1b": lambda: PipelineStrategy(num_microbatches=4, partition="uniform"),
        "pipedream": lambda: PipelineStrategy(schedule="pipedream", partition="uniform"),
        "ddp": DDPStrategy,
        "lightning": lambda: "ddp",
        "fsdp": FSDPStrategy,
        "tp": lambda: TensorParallelStrategy(plan={"model.*.linear": "colwise_gather"}),
    }[name]()


Profiled = tuple[ProfileReport, dict[str, float], bool]


def fit(name: str, directory: str, checkpoint: bool) -> Profiled:
    profiler = StepProfiler(
        every_n_steps=50,
        active_steps=ACTIVE,
        warmup_steps=1,
        trace_dir=directory,
        torch_profiler=name == "tp",
    )
    saves = [ModelCheckpoint(directory, every_n_train_steps=1)] if checkpoint else []
    # Looks at the layers of the batch that is counted, too.
    balancers = [StageBalancer(warmup_steps=1, measured_steps=5)] if name == "1f1b" else []
    trainer = make_trainer(
        devices=2,
        strategy=make(name),
        callbacks=[profiler, *balancers, *saves],
        limit_val_batches=0,
        enable_checkpointing=checkpoint,
        logger=CSVLogger(directory) if checkpoint else False,
        log_every_n_steps=1,
        max_steps=8,
    )
    before = profiler_of(trainer)
    trainer.fit(make_module(Slow), loader(), loader())
    assert profiler.report is not None
    shown = trainer.callback_metrics.items()
    metrics = {n: float(v) for n, v in shown if n.startswith("profile/")}
    return profiler.report, metrics, profiler_of(trainer) is before


def run(workers: WorkerPool, name: str, path: Path, *, checkpoint: bool = False) -> Profiled:
    (report, metrics, is_restored), other = workers.run(2, fit, name, str(path), checkpoint)
    assert is_restored
    assert other[0] == report
    assert other[1] == metrics
    assert report.num_steps == ACTIVE
    for record, account in zip(report.records, report.accounts, strict=True):
        assert sum(account.seconds.values()) == pytest.approx(account.step_seconds, rel=1e-6)
        # The other rank of a replica may find the batch there already.
        reads = record is report.records[0] or name in ("ddp", "lightning", "fsdp")
        assert account.seconds[Use.DATA_LOADING] > 0
        assert account.seconds[Use.DATA_LOADING] >= LOAD_SECONDS or not reads
        assert account.seconds[Use.FORWARD] > 0
        assert account.seconds[Use.UPDATE] > 0
        assert record.memory.measured.parameters > 0
        assert record.memory.measured.gradients > 0
        assert record.memory.measured.optimizer_state > 0
        assert record.count.activation_bytes > 0
    assert all(0 < o.uncertainty_seconds < 0.1 for o in report.offsets[1:])
    assert abs(report.offsets[1].seconds) <= 0.1  # of one machine
    assert metrics["profile/step_seconds"] == pytest.approx(report.step_seconds, rel=1e-5)
    return report, metrics, is_restored


def test_a_pipeline_is_told_action_by_action(workers: WorkerPool, tmp_path: Path) -> None:
    report, metrics, _ = run(workers, "1f1b", tmp_path, checkpoint=True)
    forward = 4 * 2 * SLEEP_SECONDS  # 4 micro-batches through 2 layers
    assert all(forward <= a.seconds[Use.FORWARD] for a in report.accounts)
    assert all(a.seconds[Use.CHECKPOINT] > 0 for a in report.accounts)
    assert report.flops == TRAINED_FLOPS
    assert report.bubble_fraction is not None
    assert report.predicted_bubble_fraction is not None
    # Two stages and 4 micro-batches, nearly all of it forward.
    assert 0.1 < report.predicted_bubble_fraction < report.bubble_fraction < 0.8
    assert [layer.name for layer in report.layers] == ["0", "1", "2", "3"]
    assert all(layer.forward_seconds >= SLEEP_SECONDS for layer in report.layers)
    first, last = (record.memory for record in report.records)
    assert first.predicted is not None
    assert last.predicted is not None
    # Kept for 2 micro-batches on the first stage, for 1 on the last.
    assert first.predicted.activations == 2 * report.records[0].count.forward_bytes
    assert last.measured.activations == last.predicted.activations
    for use in (first, last):
        assert use.predicted is not None
        assert use.measured.parameters == use.predicted.parameters == PARAMETERS // 2 * 8
        assert use.measured.gradients == use.predicted.gradients
        assert use.measured.optimizer_state == use.predicted.optimizer_state
    # Per step: 4 activations one way, 4 gradients back, each of 2 x 12 in float64.
    sent = report.bytes_by_kind[MessageKind.SEND]
    assert 2 * 4 * 2 * WIDTH * 8 < sent < 4 * 4 * 2 * WIDTH * 8
    assert metrics["profile/samples_per_second"] * report.step_seconds == pytest.approx(BATCH)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"step_profile.json", "step_profile.png", "step_profile.html"} <= files
    events = json.loads((tmp_path / "step_profile.json").read_text())["traceEvents"]
    assert {e["name"] for e in events} > {"0F0", "1B3", "data loading", "checkpoint"}
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "profile/bubble_fraction" in header


def test_an_asynchronous_pipeline(workers: WorkerPool, tmp_path: Path) -> None:
    report, _, _ = run(workers, "pipedream", tmp_path)
    assert report.flops == TRAINED_FLOPS
    assert report.predicted_bubble_fraction is not None
    assert report.bubble_fraction is not None
    first, last = (record.memory for record in report.records)
    assert first.predicted is not None
    assert first.measured.stash == first.predicted.stash == PARAMETERS // 2 * 8
    assert last.predicted is not None
    assert last.measured.stash == last.predicted.stash == 0
    # Two batches in flight on the first stage, so more than one had to be counted.
    assert first.measured.activations == first.predicted.activations
    assert first.predicted.activations == 2 * report.records[0].count.forward_bytes
    # The inputs of two layers, and no version of their weights.
    assert report.records[0].count.forward_bytes == 2 * BATCH * WIDTH * 8


def weights(name: str, directory: str, profiled: bool) -> dict[str, Tensor]:
    profilers = [StepProfiler(5, 2, directory, warmup_steps=0)] if profiled else []
    trainer = make_trainer(
        devices=2, strategy=make(name), callbacks=profilers, limit_val_batches=0, max_steps=8
    )
    module = make_module(Slow)
    trainer.fit(module, loader(), loader())
    return state_of(module)


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("name", ["pipedream", "fsdp"])
def test_looking_changes_nothing(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    plain, profiled = (workers.run(2, weights, name, str(tmp_path), p) for p in (False, True))
    for own, expected in zip(profiled, plain, strict=True):
        assert own.keys() == expected.keys()
        assert all(bool((own[n] == expected[n]).all()) for n in expected)


@pytest.mark.some("tp")
@pytest.mark.parametrize("name", ["ddp", "lightning", "fsdp", "tp"])
def test_other_strategies_are_told_by_phase(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    report, _, _ = run(workers, name, tmp_path)
    assert report.bubble_fraction is None
    least = NUM_LAYERS * SLEEP_SECONDS
    for account in report.accounts:  # forwards of FSDP and TP communicate too
        assert account.seconds[Use.FORWARD] + account.seconds[Use.COMMUNICATION] >= least
    assert report.exposed_share is not None
    assert 0 < report.exposed_share <= 1
    sent = report.bytes_by_kind
    gradients = 2 * PARAMETERS * 8  # of both ranks
    if name in ("ddp", "lightning"):
        assert sent[MessageKind.ALL_REDUCE] == pytest.approx(gradients, rel=0.01)
        assert report.flops == 2 * TRAINED_FLOPS
    if name == "fsdp":
        assert report.flops == 2 * TRAINED_FLOPS
        assert sent[MessageKind.REDUCE_SCATTER] == pytest.approx(gradients, rel=0.01)
        assert sent[MessageKind.ALL_GATHER] >= gradients
    if name == "tp":
        assert report.flops == TRAINED_FLOPS  # each rank has half of each layer
        assert sent[MessageKind.ALL_GATHER] > 0
        assert len([*tmp_path.glob("torch_rank[01]_batch3.json.gz")]) == 2


class Skipping(Slow):
    """Skips the rest of the first epoch, from a batch on."""

    skipped: int | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == self.skipped else None


def fit_accumulating(directory: str, skipped: int | None) -> ProfileReport | None:
    profiler = StepProfiler(50, 2, directory, warmup_steps=1)
    trainer = make_trainer(
        devices=2,
        strategy=make("ddp"),
        callbacks=[profiler],
        limit_val_batches=0,
        accumulate_grad_batches=2,
        max_steps=6,
        max_epochs=3,
    )
    module = make_module(Skipping)
    module.skipped = skipped
    trainer.fit(module, loader(), loader())
    return profiler.report


@pytest.mark.some("3")
@pytest.mark.parametrize("skipped", [None, 1, 2, 3])
def test_counts_are_of_a_whole_accumulation_window(
    workers: WorkerPool, tmp_path: Path, skipped: int | None
) -> None:
    """Batches 1 and 2 are counted, 3 and 4 examined; if one is skipped, then two others are."""
    report, _ = workers.run(2, fit_accumulating, str(tmp_path), skipped)
    assert report is not None
    gradients = PARAMETERS * 8
    sent = report.bytes_by_kind[MessageKind.ALL_REDUCE]  # of both ranks, once in two batches
    assert sent == pytest.approx(2 * gradients / 2, rel=0.015)  # and votes on skipping
    assert report.flops == 2 * TRAINED_FLOPS
    assert report.exposed_share is not None
    assert [r.memory.measured.gradients for r in report.records] == [gradients] * 2


class Forgetful(Callback):
    """Lets the recorder forget what is older than one batch, as it does after 20,000 spans."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        pipeline = view_of(trainer).pipeline
        assert pipeline is not None
        pipeline.recorder._marks = deque(maxlen=24)


def fit_long_window(directory: str) -> ProfileReport | None:
    profiler = StepProfiler(50, 5, directory, warmup_steps=1)
    callbacks = [Forgetful(), profiler]
    options = {"devices": 2, "limit_val_batches": 0, "max_steps": 8}
    trainer = make_trainer(strategy=make("1f1b"), callbacks=callbacks, **options)
    trainer.fit(make_module(Slow), loader(), loader())
    return profiler.report


@pytest.mark.long
def test_a_long_window_loses_no_spans_and_no_layers(workers: WorkerPool, tmp_path: Path) -> None:
    report, _ = workers.run(2, fit_long_window, str(tmp_path))
    assert report is not None
    for record in report.records:
        for start, end in record.steps:
            inside = [s for s in record.spans if start <= s.start_seconds <= s.end_seconds <= end]
            assert len([s for s in inside if s.kind is SpanKind.COMPUTE]) == 2 * 4
        assert all(layer.forward_seconds >= SLEEP_SECONDS for layer in record.layers.values())


class Manual(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: time.sleep(SLEEP_SECONDS))
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_has_a_backward_and_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    profiler = StepProfiler(active_steps=2, warmup_steps=0, trace_dir=str(tmp_path))
    options = {"devices": 1, "limit_val_batches": 0, "max_steps": 5}
    trainer = make_trainer(callbacks=[profiler], **options)
    trainer.fit(make_module(Manual), loader(), loader())
    assert profiler.report is not None
    (account,) = profiler.report.accounts
    assert account.seconds[Use.FORWARD] >= NUM_LAYERS * SLEEP_SECONDS
    assert account.seconds[Use.BACKWARD] >= SLEEP_SECONDS
    assert account.seconds[Use.UPDATE] > 0


def test_alone_and_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    profiler = StepProfiler(active_steps=2, warmup_steps=0, trace_dir=str(tmp_path))
    options = {"devices": 1, "limit_val_batches": 0}
    trainer = make_trainer(callbacks=[profiler], max_steps=5, **options)
    trainer.fit(make_module(Slow), loader(), loader())
    assert profiler.report is not None
    (account,) = profiler.report.accounts
    assert account.seconds[Use.FORWARD] >= NUM_LAYERS * SLEEP_SECONDS
    assert account.seconds[Use.BACKWARD] > 0
    assert profiler.report.flops == TRAINED_FLOPS
    printed = capsys.readouterr().out
    assert "Step profile" in printed
    assert "Memory at its peak" in printed
    short = make_trainer(callbacks=[StepProfiler()], max_steps=2, **options)
    with pytest.warns(UserWarning, match="training ended after 2 batches, and the first report"):
        short.fit(make_module(Slow), loader(), loader())
    twice = make_trainer(callbacks=[StepProfiler(), StepProfiler(50)], max_steps=2, **options)
    with pytest.raises(ValueError, match="two StepProfilers"):
        twice.fit(make_module(Slow), loader(), loader())
    traced = make_trainer(**options)
    set_profiler(traced, Tracing())
    with pytest.raises(ValueError, match="only one can"):
        StepProfiler(torch_profiler=True).setup(traced, make_module(Slow), "fit")

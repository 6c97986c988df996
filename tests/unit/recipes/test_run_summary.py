from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_dist.engine.schedules.timeline import Timeline
from recipes import run_summary, throughput
from recipes.gpt import GPT
from recipes.run_summary import RunSummary
from recipes.text import TextDataModule
from recipes.throughput import Throughput


def test_the_table_of_a_run_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # paths are printed relative to here: short enough for a row
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_val_batches=1,
        log_every_n_steps=1,
        callbacks=[RunSummary()],
        logger=CSVLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TextDataModule(batch_size=4, sequence_length=16, train_samples=8)
    trainer.fit(GPT(width=16, depth=1, num_heads=2), data)
    output = capsys.readouterr().out
    assert "beats no baseline" in output
    assert "4.68" in output
    assert "3.34" in output
    assert "tokens per second" in output
    assert "lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt" in output
    assert "lightning_logs/version_0/metrics.csv" in output
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").exists()
    assert "bubble" not in output


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        (2.0, "beats both baselines"),
        (4.0, "beats the unigram only"),
        (8.0, "beats no baseline"),
        (float("nan"), "beats no baseline"),
    ],
)
def test_the_verdict(bits: float, verdict: str) -> None:
    trainer: Any = SimpleNamespace(
        callback_metrics={"val_bits_per_byte": torch.tensor(bits)}, datamodule=TextDataModule()
    )
    (_, row), *_ = RunSummary()._quality(trainer)
    assert verdict in row


def test_other_data_has_no_baselines() -> None:
    metrics = {"val_bits_per_byte": torch.tensor(2.0)}
    trainer: Any = SimpleNamespace(callback_metrics=metrics, datamodule=None)
    assert RunSummary()._quality(trainer) == [("validation", "2.000 bits per byte")]


def test_throughput_counts_all_but_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))
    summary, trainer, module = RunSummary(), L.Trainer(logger=False, accelerator="cpu"), GPT()
    batch = (torch.zeros(2, 5), torch.zeros(2, 5))
    summary.on_train_start(trainer, module)
    for index in range(2):
        summary.on_train_batch_start(trainer, module, batch, index)
        now += 3.0  # the step
        summary.on_train_batch_end(trainer, module, None, batch, index)
        now += 1.0  # the next batch is fetched; at last the pipeline drains
    summary.on_validation_start(trainer, module)
    now += 100.0
    summary.on_train_end(trainer, module)
    assert summary._speed(trainer) == [("throughput", "2 tokens per second")]  # 20 in 8 s
    summary.on_train_start(trainer, module)
    assert summary._speed(trainer) == []


def test_the_first_batches_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))
    clock, trainer = Throughput(skipped_batches=1), L.Trainer(logger=False, accelerator="cpu")
    module, batch = GPT(), (torch.zeros(2, 5), torch.zeros(2, 5))
    clock.on_train_start(trainer, module)
    for index in range(3):
        clock.on_train_batch_start(trainer, module, batch, index)
        now += 9.0 if index == 0 else 1.0
        clock.on_train_batch_end(trainer, module, None, batch, index)
    clock.on_train_end(trainer, module)
    assert clock.tokens_per_second(trainer) == 10


def test_a_run_without_matplotlib_keeps_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ImportError("Drawing needs matplotlib")

    monkeypatch.setattr(run_summary, "plot_timeline", refuse)
    row = run_summary._draw(Timeline(2, ()), Path("timeline.png"))
    assert row == "not drawn. Drawing needs matplotlib"

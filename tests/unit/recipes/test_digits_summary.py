from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from recipes import digits_summary
from recipes.digits import DigitsDataModule
from recipes.digits_summary import DigitsSummary, quality
from recipes.resnet import ResNet


def test_the_table_of_a_run_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        limit_test_batches=2,
        log_every_n_steps=1,
        callbacks=[DigitsSummary()],
        logger=CSVLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, data = ResNet(width=4), DigitsDataModule(batch_size=8)
    trainer.fit(module, data)
    assert "Run summary" not in capsys.readouterr().out
    for _ in range(2):  # the second test counts anew
        trainer.test(module, data, verbose=False)
        output = capsys.readouterr().out
        assert "of 16 images" in output
        assert "2 steps in" in output
        assert "lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt" in output
        assert "lightning_logs/version_0/metrics.csv" in output
        assert "lightning_logs/version_0/confusion.png" in output
    assert (tmp_path / "lightning_logs/version_0/confusion.png").stat().st_size > 1000


def test_accuracy_and_mistakes_by_hand() -> None:
    confusion = torch.tensor([[5, 0, 1], [2, 3, 0], [1, 0, 4]])
    assert quality(confusion) == [
        ("test accuracy", "75.00% (12 of 16 images)"),
        ("mistakes", "1 taken for 0 (2), 0 taken for 2 (1), 2 taken for 0 (1)"),
    ]


def test_more_mistakes_than_are_shown() -> None:
    confusion = torch.tensor([[0, 1, 2], [3, 0, 4], [0, 0, 9]])
    assert (
        quality(confusion)[1][1] == "1 taken for 2 (4), 1 taken for 0 (3), 0 taken for 2 (2), ..."
    )


def test_no_mistakes() -> None:
    assert quality(torch.eye(2, dtype=torch.long)) == [
        ("test accuracy", "100.00% (2 of 2 images)"),
        ("mistakes", "none"),
    ]


def test_a_run_without_matplotlib_keeps_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "confusion.png"
    row = digits_summary._draw(torch.eye(10), picture)
    assert row.startswith("not drawn. ")
    assert not picture.exists()

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from recipes.wandb_checkpoints import WandbCheckpoints, download_checkpoint


class NotedLogger(WandbLogger):
    """Notes what would be uploaded."""

    def __init__(self) -> None:
        self.logged: list[tuple[Any, list[str]]] = []

    @property
    def version(self) -> str:
        return "id"

    @property
    def experiment(self) -> Any:
        def log(artifact: Any, aliases: list[str]) -> None:
            self.logged.append((artifact, aliases))

        return SimpleNamespace(log_artifact=log)


@pytest.fixture(autouse=True)
def _staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> tuple[L.Trainer, ModelCheckpoint, NotedLogger]:
    logger, checkpoints = NotedLogger(), ModelCheckpoint(monitor="loss")
    trainer = SimpleNamespace(
        loggers=[logger],
        checkpoint_callbacks=[checkpoints],
        is_global_zero=True,
        strategy=object(),
        world_size=2,
    )
    return cast(L.Trainer, trainer), checkpoints, logger


def write_shards(path: Path) -> Path:
    path.mkdir()
    for name in ("a.pt", "b.pt"):
        (path / name).write_text(name)
    return path


def test_directories_and_files_are_uploaded_once(
    run: tuple[L.Trainer, ModelCheckpoint, NotedLogger], tmp_path: Path
) -> None:
    trainer, checkpoints, logger = run
    shards, file = write_shards(tmp_path / "shards.ckpt"), tmp_path / "file.ckpt"
    file.write_text("whole")
    (tmp_path / "last.ckpt").symlink_to(file)
    checkpoints.best_k_models = {str(shards): torch.tensor(2.0), str(file): torch.tensor(3.0)}
    checkpoints.best_model_path = str(shards)
    checkpoints.last_model_path = str(tmp_path / "last.ckpt")
    callback, module = WandbCheckpoints(), L.LightningModule()
    callback.on_train_epoch_start(trainer, module)
    assert logger.logged == []  # at the end only
    for _ in range(2):
        callback.on_fit_end(trainer, module)
    (first, its_aliases), (second, aliases) = logger.logged
    assert set(first.manifest.entries) == {"a.pt", "b.pt"}
    assert set(second.manifest.entries) == {"file.ckpt"}
    assert (its_aliases, aliases) == (["latest", "best"], ["latest"])
    assert (first.name, first.type) == ("checkpoint-id", "model")
    assert first.metadata["score"] == 2.0
    assert first.metadata["original_filename"] == "shards.ckpt"


def test_several_callbacks_save_checkpoints_of_one_run(
    run: tuple[L.Trainer, ModelCheckpoint, NotedLogger], tmp_path: Path
) -> None:
    trainer, checkpoints, logger = run
    steps = ModelCheckpoint(every_n_train_steps=2)
    trainer.checkpoint_callbacks[:] = [steps, checkpoints]
    steps.best_model_path = str(write_shards(tmp_path / "step.ckpt"))
    checkpoints.best_model_path = str(write_shards(tmp_path / "loss.ckpt"))
    os.utime(steps.best_model_path, (1, 1))  # the older one
    WandbCheckpoints().on_fit_end(trainer, L.LightningModule())
    found = [(a.metadata["original_filename"], aliases) for a, aliases in logger.logged]
    assert found == [("step.ckpt", ["latest"]), ("loss.ckpt", ["latest", "best"])]
    assert [a.metadata["monitor"] for a, _ in logger.logged] == [None, "loss"]


def test_checkpoints_may_be_uploaded_as_they_come(
    run: tuple[L.Trainer, ModelCheckpoint, NotedLogger], tmp_path: Path
) -> None:
    trainer, checkpoints, logger = run
    checkpoints.best_model_path = str(write_shards(tmp_path / "shards.ckpt"))
    WandbCheckpoints(when="epoch").on_train_epoch_start(trainer, L.LightningModule())
    assert len(logger.logged) == 1
    with pytest.raises(ValueError, match="when='never' is unknown"):
        WandbCheckpoints(when="never")  # type: ignore[arg-type]


class Stored:
    """An artifact of a server."""

    name, digest = "checkpoint-id:v3", "abc"
    downloads = 0

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def download(self, root: str) -> None:
        Stored.downloads += 1
        Path(root).mkdir()
        for name in self._files:
            Path(root, name).write_text(name)


@pytest.mark.parametrize("files", [["model.ckpt"], ["a.pt", "b.pt"]])
def test_a_checkpoint_is_downloaded_once(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def artifact(name: str, type: str) -> Stored:
        asked.append(name)
        return Stored(files)

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=artifact))
    monkeypatch.setattr(Stored, "downloads", 0)
    paths = {download_checkpoint("wandb:me/project/x:best", tmp_path / "kept") for _ in range(2)}
    (path,) = paths
    kept = tmp_path / "kept" / "checkpoint-id-abc"
    assert path == (kept / "model.ckpt" if len(files) == 1 else kept)
    assert asked == ["me/project/x:best"] * 2
    assert Stored.downloads == 1


def test_an_unknown_artifact_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, type: str) -> None:
        raise wandb.errors.CommError("artifact 'x' not found")

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=refuse))
    with pytest.raises(ValueError, match="wandb:me/p/x:best is not found: artifact 'x' not found"):
        download_checkpoint("wandb:me/p/x:best", tmp_path)


def test_without_wandb_its_install_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-dist\[wandb\]'"):
        download_checkpoint("wandb:me/p/x:best", tmp_path)

"""Checkpoints as artifacts of Weights & Biases: files, and directories of shards.

Lightning's ``WandbLogger(log_model=True)`` uploads files, and skips directories silently.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

if TYPE_CHECKING:
    from wandb import Artifact

PREFIX = "wandb:"
_TYPE = "model"


class WandbCheckpoints(L.Callback):
    """Uploads the checkpoints of a run to each W&B logger.

    They are versions of one artifact, ``checkpoint-<id of the run>``, with the aliases ``latest``
    and ``best``. With several ``ModelCheckpoint`` the first one with a ``monitor`` has the best.
    ``--ckpt_path=wandb:checkpoint-<id>:best`` trains on from one, see
    :func:`download_checkpoint`.

    Args:
        when: ``"end"`` uploads what is there when training has ended; ``"epoch"`` does so ahead of
            each epoch, too.
    """

    def __init__(self, when: Literal["end", "epoch"] = "end") -> None:
        if when not in ("end", "epoch"):
            raise ValueError(f"when={when!r} is unknown; use 'end' or 'epoch'.")
        self._when = when
        self._uploaded: dict[str, float] = {}  # paths, and when they were written

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._when == "epoch":
            self._upload(trainer)

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._upload(trainer)  # saves that a thread writes have ended, too

    def _upload(self, trainer: L.Trainer) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        if not trainer.is_global_zero or not loggers or not callbacks:
            return
        best = next((c for c in callbacks if c.monitor is not None), callbacks[0]).best_model_path
        owners = {
            path: c
            for c in callbacks
            for path in {*c.best_k_models, c.last_model_path, c.best_model_path}
            if path and os.path.exists(path) and not os.path.islink(path)
        }
        written = {path: os.stat(path).st_mtime for path in owners}
        new = [path for path in written if self._uploaded.get(path) != written[path]]
        for path in sorted(new, key=written.__getitem__):
            callback, aliases = owners[path], ["latest", *(["best"] if path == best else [])]
            score = callback.best_k_models.get(path)
            metadata = {
                "original_filename": Path(path).name,
                "monitor": callback.monitor,
                "score": None if score is None else float(score),
                "strategy": type(trainer.strategy).__name__,
                "num_processes": trainer.world_size,
            }
            for logger in loggers:
                artifact = make_artifact(f"checkpoint-{logger.version}", Path(path), metadata)
                logger.experiment.log_artifact(artifact, aliases=aliases)
        self._uploaded.update(written)


def make_artifact(name: str, path: Path, metadata: dict[str, object]) -> Artifact:
    """Returns an artifact of a checkpoint.

    Args:
        name: Name of the artifact.
        path: A file, or a directory of shards.
        metadata: What W&B shows beside it.
    """
    import wandb

    artifact = wandb.Artifact(name, type=_TYPE, metadata=metadata)
    if path.is_dir():
        artifact.add_dir(str(path))
    else:
        artifact.add_file(str(path), name=path.name)
    return artifact


def download_checkpoint(address: str, folder: Path = Path("runs/wandb_checkpoints")) -> Path:
    """Downloads a checkpoint once, however many ranks of this host ask for it.

    Args:
        address: ``wandb:`` and what ``wandb.Api().artifact`` takes: ``entity/project/name:alias``.
        folder: Where downloaded checkpoints are kept.

    Returns:
        Path of the file, or of the directory of shards, for ``ckpt_path``.

    Raises:
        ValueError: W&B is not installed, or has no such artifact.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"{address} needs W&B: pip install 'lightning-dist[wandb]'") from error
    try:
        artifact = wandb.Api().artifact(address.removeprefix(PREFIX), type=_TYPE)
    except (wandb.errors.CommError, ValueError) as error:
        raise ValueError(f"{address} is not found: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{artifact.name.partition(':')[0]}-{artifact.digest}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=folder) as partial:
                artifact.download(root=f"{partial}/files")
                os.rename(f"{partial}/files", kept)
    files = list(kept.iterdir())
    return files[0] if len(files) == 1 else kept

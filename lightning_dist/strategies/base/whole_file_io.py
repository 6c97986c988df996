"""Write the one ordinary file of a checkpoint, and remove either form of checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_dist.engine.checkpoint import directory as files
from lightning_dist.engine.checkpoint import files as checkpoints


def is_local(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is one of the operating system, not a URL."""
    return "://" not in os.fspath(path)


class WholeFileIO(TorchCheckpointIO):
    """Writes a file under a temporary name first; leaves URLs to Lightning."""

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is None and is_local(path):
            checkpoints.save_full(checkpoint, path)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        if is_local(path):
            files.withdraw(Path(path))  # a directory of shards too
        else:
            super().remove_checkpoint(path)

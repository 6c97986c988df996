"""Lightning's reader and writer of a checkpoint of one file, with whole files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_dist.engine.checkpoint import files as checkpoints
from lightning_dist.engine.checkpoint.damaged import naming_damaged_file
from lightning_dist.engine.checkpoint.places import is_local, place_of


class WholeFileIO(TorchCheckpointIO):
    """Writes a file under a temporary name first, and names one that is damaged.

    URLs are left to Lightning.
    """

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
            if storage_options is None and checkpoints.is_sharded(path):
                place_of(path).withdraw()  # its marker would still count
            super().save_checkpoint(checkpoint, path, storage_options)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        if is_local(path) or checkpoints.is_sharded(path):
            place_of(path).withdraw()
        else:
            super().remove_checkpoint(path)

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with naming_damaged_file(path):
            return super().load_checkpoint(path, *args, **kwargs)

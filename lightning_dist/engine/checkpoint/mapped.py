"""Weights of a checkpoint as memory-mapped files: the kernel reads and drops their pages.

A library that writes a model wants all its tensors at once. Mapped tensors look so, but take no
memory of the process. A file's are in the file itself. Those of a sharded checkpoint are joined in
scratch files first, one shard at a time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dist.engine.checkpoint import directory, saved_names
from lightning_dist.engine.checkpoint.damaged import naming_damaged_file
from lightning_dist.engine.checkpoint.files import OPTIMIZERS, SECTIONS, is_sharded, load_full
from lightning_dist.engine.checkpoint.places import is_local, place_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load_mapped(
    path: str | os.PathLike[str], scratch: Path, *, weights_only: bool | None = True
) -> dict[str, Any]:
    """Loads a checkpoint of either form without its optimizers' states, the weights mapped.

    One file at a URL is not mapped, and is loaded whole. The scratch directory needs room for the
    weights; nothing is left in it. Names of a tied parameter have one tensor.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The file is no Lightning checkpoint, or its shards are damaged.
    """
    if is_sharded(path):
        checkpoint = _join(path, scratch, weights_only)
    elif is_local(path) and (file := directory.resolve(path)).is_file():
        try:
            with naming_damaged_file(file):
                checkpoint = torch.load(
                    file, map_location="cpu", weights_only=weights_only, mmap=True
                )
        except RuntimeError as error:
            raise ValueError(
                f"{file} is no checkpoint, or torch wrote it in the format that it had before 1.6:"
                f" {str(error).splitlines()[0]}"
            ) from error
    else:
        checkpoint = load_full(path, weights_only=weights_only)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ValueError(
            f"{os.fspath(path)} is no Lightning checkpoint: it has no 'state_dict' that is a dict."
        )
    left_out = (SECTIONS.keys() | OPTIMIZERS) - {"state_dict"}
    return {key: value for key, value in checkpoint.items() if key not in left_out}


def _join(path: str | os.PathLike[str], scratch: Path, weights_only: bool | None) -> dict[str, Any]:
    from lightning_dist.engine.checkpoint.shards import read_shards  # late, as its docstring says

    checkpoint, folder = place_of(path).load_marker(weights_only)
    prefix = SECTIONS["state_dict"] + "."
    tensors = read_shards(
        folder, lambda key: key.startswith(prefix), lambda _, info: _mapped(info, scratch)
    )
    weights = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    checkpoint["state_dict"] = weights | checkpoint["state_dict"]
    saved_names.unfold(checkpoint, ["state_dict"])
    return checkpoint


def _mapped(info: TensorStorageMetadata, scratch: Path) -> Tensor:
    """Creates a tensor in a scratch file, which has no name any more: a killed process leaves none.

    Raises:
        OSError: The disk has no room.
    """
    size, dtype = info.size, info.properties.dtype
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=scratch, prefix=".export-") as file:
        # Else a full disk would end the process where it writes to a page, by a signal.
        os.posix_fallocate(file.fileno(), 0, size.numel() * dtype.itemsize)
        flat = torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype)
    return flat.view(size)

"""The tensors of a sharded checkpoint, written and read by torch.

Import this module where it is used: ``torch.distributed.checkpoint`` takes half as long to import
as all of this package, and most runs write one file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_dist.engine.checkpoint.directory import storage_error
from lightning_dist.engine.checkpoint.joint_save import RanksFailedError
from lightning_dist.engine.checkpoint.metadata import ShardReader, reason_of
from lightning_dist.engine.tensors.dtensor import is_storable


def write_shards(
    tensors: dict[str, Tensor], folder: Path | str, group: dist.ProcessGroup | None
) -> None:
    """Writes this rank's tensors; a key that several ranks have once. Collective.

    Raises:
        RanksFailedError: A rank could not write; raised on all ranks.
    """
    # A thread may write with a group, and Python's warning filters belong to all threads.
    with _silent_about_one_process() if group is None else nullcontext():
        try:
            dcp.save(
                tensors,
                checkpoint_id=folder,
                storage_writer=_DiskWriter(folder) if isinstance(folder, Path) else None,
                process_group=group,
                no_dist=group is None,
            )
        except dcp.CheckpointException as error:
            causes = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            raise RanksFailedError(causes) from error


class _DiskWriter(dcp.FileSystemWriter):
    """Raises the file system's error where torch's writer of a file raises one of its own.

    Other ranks learn of an error without its causes.
    """

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = storage_error(error)
            if cause is None:
                raise
            raise cause from error


def read_shards(
    folder: Path | str,
    is_wanted: Callable[[str], bool],
    create: Callable[[str, TensorStorageMetadata], Tensor],
) -> dict[str, Tensor]:
    """Reads the tensors of wanted keys into created ones, without communication.

    Of a DTensor only this rank's shard is read.

    Raises:
        OSError: A file could not be read.
        ValueError: The index or a shard is damaged.
    """
    reader = ShardReader(folder)
    tensors = {
        key: create(key, info)
        for key, info in reader.metadata.state_dict_metadata.items()
        if isinstance(info, TensorStorageMetadata) and is_wanted(key)
    }
    with _silent_about_one_process():
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:  # which is no `Exception`
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise cause from error
            raise ValueError(
                f"A shard in {folder} is damaged, or was made to run code where it is read:"
                f" {type(cause).__name__}: {reason_of(cause)} None of it was run; use another copy."
            ) from error
    return tensors


def empty_like(info: TensorStorageMetadata, parameter: Tensor | None) -> Tensor:
    """Creates a tensor to read into, sharded like its parameter if the shapes are equal."""
    if parameter is not None and is_storable(parameter) and parameter.shape == info.size:
        return torch.empty_like(parameter, dtype=info.properties.dtype)
    return torch.empty(info.size, dtype=info.properties.dtype)


@contextmanager
def _silent_about_one_process() -> Iterator[None]:
    """Hides torch's warning that `no_dist` loads or saves in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* in a single process.*")
        yield

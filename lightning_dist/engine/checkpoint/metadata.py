"""The index of a checkpoint's shards, read without trusting the file.

torch pickles the index, and torch's own reader calls any function that the file names. Here a name
stands for a record, which has no behaviour and stores the file's arguments and state of an object.
When the values have been checked, the records are converted to torch's own objects. torch reads the
shards themselves as tensors only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from lightning_dist.engine.checkpoint.places import is_local

_WRITTEN = (  # the modules of what torch writes; `pathlib._local` is that of Python 3.13
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "pathlib",
    "pathlib._local",
)


class ShardReader(FileSystemReader):
    """Reads shards, and an index that need not be trusted.

    Raises:
        ValueError: The index is not one that torch writes.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        if not is_local(path):
            # torch's reader for URLs, but for the class around it: that trusts the index. Private,
            # without a public counterpart; `dcp.load(checkpoint_id=url)` uses it.
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

            self.fs = FileSystem()  # type: ignore[assignment]
            self.path = self.fs.init_path(path)
        index = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(index, "rb") as file:
            self.metadata = _read(cast(BinaryIO, file), index)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def reason_of(error: BaseException) -> str:
    """Returns why ``torch.load`` refused a file, without torch's advice to trust the file."""
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    return next((line for line in lines if "GLOBAL" in line), lines[0])


class _Record:
    """An object as the file describes it: constructor arguments and state."""

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        # In place of `__dict__.update`, which would let a file replace attributes of a class too.
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Creates records, sizes and dtypes, and nothing else."""

    @override
    def find_class(self, module_name: str, name: str) -> Any:
        if module_name in _WRITTEN or (module_name, name) == ("torch.serialization", "_get_layout"):
            return type(name, (_Record,), {})
        found = getattr(torch, name, None) if module_name == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module_name}.{name}")


def _read(file: BinaryIO, path: str | os.PathLike[str]) -> Metadata:
    try:
        state = _state(_Unpickler(file).load(), "Metadata")
        return Metadata(
            {str(name): _storage(record) for name, record in state["state_dict_metadata"].items()},
            storage_data={_index(key): _place(v) for key, v in state["storage_data"].items()},
            storage_meta=StorageMeta(),
            version=state.get("version"),
        )
    except Exception as error:
        raise ValueError(
            f"{path} is no index of shards that torch writes: {error}. None of it was loaded."
            " The file is damaged, or was made to run code where it is read; use another copy"
            " of the checkpoint."
        ) from error


def _state(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it has a {type(record).__name__} for a {name}")
    return dict(record.state or {})


def _storage(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == BytesStorageMetadata.__name__:
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has {dtype!r} for a dtype")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    state = _state(record, "MetadataIndex")
    offset = state.get("offset")
    where = None if offset is None else _size(offset)
    return MetadataIndex(str(state["fqn"]), where, state.get("index"))


def _place(record: Any) -> Any:
    state = _state(record, "_StorageInfo")
    name = state["relative_path"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"it has a shard in {name!r}, which is not in the checkpoint's directory")
    offset, length = _size((state["offset"], state["length"]))
    return torch_files._StorageInfo(name, offset, length)


def _size(values: Iterable[Any]) -> torch.Size:
    size = torch.Size(values)
    if min(size, default=0) < 0:
        raise ValueError(f"it has {tuple(size)} for a size or a place")
    return size

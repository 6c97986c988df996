"""The two kinds of places for a sharded checkpoint: a directory on a disk, and a URL.

A disk has an atomic rename, so a save fills a directory under another name and renames it. An
object store has none. There a save writes shards of its own, beside those of the checkpoint before,
and one small object is the commit marker: it says which shards are the checkpoint's.

.. code-block:: text

    s3://bucket/epoch=3.ckpt/
      lightning.pt       the marker, written last in one operation; names the folder of shards
      README.txt
      shards-1f0c.../    .metadata, *.distcp
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_dist.engine.checkpoint import directory

MARKER = "lightning.pt"
"""The file whose presence makes a directory a whole checkpoint."""
_README = "README.txt"
_SHARDS = "shards"  # in the marker at a URL: the name of the shards' folder
_PREFIX = "shards-"  # of that name


def is_local(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is one of the operating system, not a URL."""
    return "://" not in os.fspath(path)


class Draft:
    """A folder for the shards of a save that is under way, at the same path on all ranks."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self._files, self._root = LocalFileSystem(), os.path.abspath(path)
        if isinstance(path, str):
            self._files, self._root = url_to_fs(path)

    def make_marked(self, name: str) -> None:
        """Creates the empty folder, with a file in it."""
        if isinstance(self.path, Path):  # the name is that of a killed save's folder, too
            directory.remove(self.path)
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{name}", b"seen")

    def has(self, name: str) -> bool:
        """Returns whether this rank sees a file of the folder."""
        self._files.invalidate_cache()  # some file systems remember what was not there
        return bool(self._files.exists(f"{self._root}/{name}"))

    def unmark(self, name: str) -> None:
        """Removes a file of the folder, if there is one; only one rank would see an error."""
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def discard(self) -> None:
        """Removes what can be removed of the folder, if there is one, without an error."""
        if isinstance(self.path, Path):
            with suppress(OSError):  # the next save removes it
                directory.remove(self.path)
            return
        with suppress(Exception):
            if self._files.exists(self._root):
                self._files.rm(self._root, recursive=True)
        with suppress(Exception):  # many file systems stop at the first error
            for path in self._files.find(self._root):
                with suppress(Exception):
                    self._files.rm_file(path)


class DiskPlace:
    """A directory for one sharded checkpoint, on a file system that all ranks share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has_checkpoint(self) -> bool:
        """Returns whether there is a whole checkpoint."""
        return (directory.resolve(self._path) / MARKER).is_file()

    def load_marker(self, weights_only: bool | None) -> tuple[dict[str, Any], Path]:
        """Loads what the marker holds, and returns it with the path of the shards."""
        resolved = directory.resolve(self._path)
        loaded = torch.load(resolved / MARKER, map_location="cpu", weights_only=weights_only)
        return loaded, resolved

    def draft(self, name: str) -> Draft:
        """Returns the folder for a save's shards, by a name of its own, the same on all ranks."""
        # One name for all saves: the next one removes what a killed one has left.
        return Draft(directory.temporary_name(self._path))

    def publish(self, draft: Draft, rest: Mapping[str, Any], help_text: str) -> None:
        """Makes a draft the checkpoint, and removes the one before.

        The rest is what has no tensors; the help text tells a reader of the directory what it is.
        """
        folder = Path(draft.path)
        directory.write(folder / _README, lambda file: file.write(help_text.encode()))
        directory.write(folder / MARKER, lambda file: torch.save(dict(rest), file))
        directory.publish(folder, self._path)

    def withdraw(self) -> None:
        """Removes the checkpoint; at each instant it is whole or not there."""
        directory.withdraw(self._path)


class UrlPlace:
    """A URL for one, of a file system that fsspec knows; see :class:`DiskPlace`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, self._root = url_to_fs(self._url)

    def has_checkpoint(self) -> bool:
        """Returns whether there is a marker."""
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/{MARKER}"))

    def load_marker(self, weights_only: bool | None) -> tuple[dict[str, Any], str]:
        """Loads what the marker holds, and returns it with the URL of the shards."""
        marker = io.BytesIO(self._files.cat_file(f"{self._root}/{MARKER}"))  # in one request
        loaded = torch.load(marker, map_location="cpu", weights_only=weights_only)
        return loaded, f"{self._url}/{_checked(loaded.pop(_SHARDS, None), self._url)}"

    def draft(self, name: str) -> Draft:
        """Returns a folder beside the others."""
        return Draft(f"{self._url}/{_PREFIX}{name}")

    def publish(self, draft: Draft, rest: Mapping[str, Any], help_text: str) -> None:
        """Writes the marker, and removes the shards of other saves."""
        kept = str(draft.path).rpartition("/")[2]
        marker = io.BytesIO()
        torch.save({**rest, _SHARDS: kept}, marker)
        self._files.pipe_file(f"{self._root}/{_README}", help_text.encode())
        self._files.pipe_file(f"{self._root}/{MARKER}", marker.getvalue())
        self._files.invalidate_cache()
        for path in self._files.ls(self._root, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if name.startswith(_PREFIX) and name != kept:
                Draft(f"{self._url}/{name}").discard()

    def withdraw(self) -> None:
        """Removes the marker, then all else."""
        if self.has_checkpoint():
            self._files.rm_file(f"{self._root}/{MARKER}")
        if self._files.exists(self._root):
            self._files.rm(self._root, recursive=True)


Place: TypeAlias = DiskPlace | UrlPlace


def place_of(path: str | os.PathLike[str]) -> Place:
    """Returns the place of a path or a URL."""
    return DiskPlace(Path(path)) if is_local(path) else UrlPlace(os.fspath(path))


def _checked(name: Any, url: str) -> str:
    """Returns the name of a marker's shards, which must be beside the marker."""
    if isinstance(name, str) and name.startswith(_PREFIX) and "/" not in name:
        return name
    raise ValueError(
        f"{url}/{MARKER} names no shards beside it, but {name!r}. Use another copy of the"
        " checkpoint."
    )

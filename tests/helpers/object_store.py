"""``objects://PATH``: a disk as an object store, for fsspec, that processes share.

It has no rename: a file is moved by a copy and a removal, and a directory not at all.
"""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "objects"


class ObjectStore(LocalFileSystem):
    """A local file system without rename."""

    protocol = SCHEME

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{SCHEME}://"))

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if self.isdir(path1):
            raise NotImplementedError(f"{path1} is no object")
        self.cp_file(path1, path2)
        self.rm_file(path1)

    rename = mv


fsspec.register_implementation(SCHEME, ObjectStore, clobber=True)

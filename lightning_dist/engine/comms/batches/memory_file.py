"""Files in memory that processes of one host share.

A file has no name, so nothing is left behind when a process is killed. Another process opens the
file by its number in the process that created it. On another host, in another container, as another
user or without Linux that fails. If it does not fail there, a secret at the begin of the file shows
whether the file is the right one.
"""

from __future__ import annotations

import os

SECRET_BYTES = 16


def can_make_files() -> bool:
    """Returns whether this system has such files."""
    return hasattr(os, "memfd_create")


def open_file(process: int, descriptor: int, name: str) -> int:
    """Opens a file of another process.

    Args:
        process: Id of the process that created the file.
        descriptor: Number of the open file in that process.
        name: Name with which the file was created.

    Returns:
        Number of the file in this process, open for reading and writing.

    Raises:
        OSError: This process cannot open the file, or it has another name.
    """
    path = path_of(process, descriptor)
    # Checked first, since opening a file of another kind may wait for ever, or have effects.
    if os.readlink(path).split(" ")[0] != f"/memfd:{name}":
        raise OSError(f"{path} is another file.")
    return os.open(path, os.O_RDWR)


def path_of(process: int, descriptor: int) -> str:
    """Returns the path by which this process sees a file of another one.

    Args:
        process: Id of the other process.
        descriptor: Number of the open file there.
    """
    return f"/proc/{process}/fd/{descriptor}"

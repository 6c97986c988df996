"""Files in memory that processes of one host share.

A file has no name, so nothing is left behind when a process is killed. Another process opens it by
the number that it has in the process that made it. On another host, in another container, as
another user or without Linux that fails; and where it does not, a secret at the begin of the file
says whether it is the right one.
"""

from __future__ import annotations

import os

SECRET_BYTES = 16


def can_make_files() -> bool:
    """Checks whether this system has such files."""
    return hasattr(os, "memfd_create")


def open_file(process: int, descriptor: int, name: str) -> int:
    """Opens a file of another process.

    Args:
        process: Id of the process that has made it.
        descriptor: Number of the open file there.
        name: That it was made with.

    Returns:
        Its number here, open for reading and writing.

    Raises:
        OSError: It cannot be opened here, or is a file of another name.
    """
    path = path_of(process, descriptor)
    # Looked at first: to open what is not such a file may wait for ever, or do something.
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

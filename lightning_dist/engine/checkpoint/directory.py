"""How a checkpoint takes its name: when it is whole, and with no instant in which there is none.

A file or directory is written under a temporary name and flushed to the disk. Then it changes
places with the checkpoint before, which is removed last. A process may die at any point: under the
name is one of the two, whole. Only where a file system cannot exchange names does the old directory
step aside first. Its name is then one that Lightning's search for the last checkpoint finds, and
:func:`resolve` finds it under the one it had.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100  # <fcntl.h>: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class NotSavedError(OSError):
    """A file system could not take a checkpoint."""


def temporary_name(target: Path) -> Path:
    """Returns where a checkpoint is written until it is whole.

    Args:
        target: The checkpoint's own path.
    """
    return target.with_name(f".{target.name}.saving")


def aside_name(target: Path) -> Path:
    """Returns where a directory waits for its removal if names cannot be exchanged.

    Args:
        target: The checkpoint's own path.
    """
    return target.with_name(f"{target.stem}.replaced{target.suffix}")


def resolve(path: str | os.PathLike[str]) -> Path:
    """Returns where a checkpoint is, which may have stepped aside for one that never came.

    Args:
        path: The checkpoint's own path.
    """
    target = Path(path)
    aside = aside_name(target)
    return aside if not target.exists() and aside.exists() else target


def publish(temporary: Path, target: Path) -> None:
    """Gives a checkpoint its name, and removes the one that had it.

    Args:
        temporary: A file or directory; what is in files has been flushed.
        target: In the same directory.
    """
    flush(temporary)
    aside = aside_name(target)
    if not os.path.lexists(target) or not (temporary.is_dir() or target.is_dir()):
        os.replace(temporary, target)
    elif not exchange(temporary, target):
        remove(aside)
        target.rename(aside)
        temporary.rename(target)
    flush(target.parent)  # the new name must be on the disk before the old checkpoint goes
    remove(temporary)
    remove(aside)


def exchange(one: Path, other: Path) -> bool:
    """Lets two files or directories change names in one step.

    Args:
        one: The first.
        other: The second, in the same file system.

    Returns:
        Whether the file system can; if not, nothing has changed.
    """
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:  # an old C library
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _CANNOT:
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def flush(path: Path) -> None:
    """Waits until a file's contents, or a directory's names, are on the disk.

    Args:
        path: Of either.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def withdraw(target: Path) -> None:
    """Removes a checkpoint, which is whole under its name or not there.

    Args:
        target: The checkpoint's own path.
    """
    temporary = temporary_name(target)
    remove(temporary)
    if os.path.lexists(target):
        target.rename(temporary)
    remove(temporary)
    remove(aside_name(target))


def remove(path: Path) -> None:
    """Removes a file, a link or a directory, if there is one.

    Args:
        path: Of it.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Removes what a save has written if it fails.

    Args:
        temporary: Where it writes.

    Yields:
        Nothing.
    """
    try:
        yield
    except BaseException:
        # What cannot be removed must not hide the failure.
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def describe_failure(path: str | os.PathLike[str], error: BaseException) -> str:
    """Returns a sentence on a save that has failed, with the free bytes of its disk.

    Args:
        path: The checkpoint's.
        error: Why.
    """
    if isinstance(error, NotSavedError):
        return str(error)
    why = f"{type(error).__name__}: {error}".rstrip(".")
    failed = f"{os.fspath(path)} was not saved: {why}."
    if "://" in os.fspath(path):
        return failed
    folder = next(p for p in Path(path).absolute().parents if p.is_dir())
    free = shutil.disk_usage(folder).free
    kept = " The checkpoint before is as it was." if os.path.lexists(path) else ""
    return f"{failed} {free:,} bytes were free in {folder}.{kept}"


def is_storage_error(error: BaseException) -> bool:
    """Whether an error is the file system's, or was raised on the way out of one that is.

    Args:
        error: That a save has raised.
    """
    before = error.__cause__ or error.__context__
    return isinstance(error, OSError) or (before is not None and is_storage_error(before))

"""Atomic replacement of a checkpoint: at each instant its name belongs to a whole checkpoint.

A file or directory is written under a temporary name and flushed to the disk. Then a file takes the
name of the checkpoint before, and a directory exchanges names with it. The old one is removed last.
If a file system cannot exchange names, the old directory is renamed first. Lightning's search for
the last checkpoint finds that name, too, and :func:`resolve` finds the directory by its old name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

_NAME_BYTES = 255  # the longest name of usual file systems
# Files of which one is in each checkpoint that is a directory: ours, Lightning's and torch's.
_MARKS = ("lightning.pt", "meta.pt", ".metadata")


class NotSavedError(OSError):
    """A file system could not take a checkpoint."""


def temporary_name(target: Path) -> Path:
    """Returns the temporary path of a checkpoint that is being written.

    Lightning takes each name with "ckpt_" in it for a checkpoint that it saved when SLURM ended a
    job, and counts them.
    """
    return _beside(target, f".{target.name.replace('ckpt_', 'ckpt-')}.saving")


def aside_name(target: Path) -> Path:
    """Returns the path of the replaced directory, for file systems that cannot exchange names."""
    return _beside(target, f"{target.stem}.replaced{target.suffix}")


def _beside(target: Path, name: str) -> Path:
    encoded = os.fsencode(name)
    fits = len(encoded) <= _NAME_BYTES
    return target.with_name(name if fits else hashlib.sha256(encoded).hexdigest())


def resolve(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a checkpoint, or of the replaced one if a save died while renaming."""
    target = Path(path)
    aside = aside_name(target)
    return aside if not target.exists() and aside.exists() else target


def publish(temporary: Path, target: Path, replaceable: Sequence[str] = ()) -> None:
    """Renames a written and flushed checkpoint to its own path, and removes the one before.

    Args:
        temporary: The path at which it was written.
        target: Its own path.
        replaceable: See :func:`refuse_other_folder`.

    Raises:
        NotSavedError: See :func:`refuse_other_folder`.
    """
    refuse_other_folder(target, replaceable)
    flush(temporary)
    aside = aside_name(target)
    if not os.path.lexists(target) or not (_is_folder(temporary) or _is_folder(target)):
        temporary.replace(target)
    elif not exchange(temporary, target):
        remove(aside)
        target.rename(aside)
        temporary.rename(target)
    flush(target.parent)  # the new name must be on the disk before the old checkpoint goes
    for old in (temporary, aside):
        try:
            remove(old)
        except OSError as error:  # raised, it would say that nothing was saved
            warnings.warn(
                f"{target} was saved, but the checkpoint before could not be removed: {error}."
                f" Remove what is left of it in {old}.",
                stacklevel=2,
            )


def refuse_other_folder(target: Path, replaceable: Sequence[str] = ()) -> None:
    """Refuses a path at which a save would remove other files than a checkpoint.

    Args:
        target: The path.
        replaceable: Patterns of names. A directory in which all names match may be removed, too.

    Raises:
        NotSavedError: There is a directory of other files.
    """
    if not _is_folder(target) or any((target / mark).exists() for mark in _MARKS):
        return
    names = sorted(path.name for path in target.iterdir())
    others = [name for name in names if not any(fnmatch(name, one) for one in replaceable)]
    if others:
        raise NotSavedError(
            f"{target} is a directory of other files, and no checkpoint: it has {others[0]!r}. A"
            f" save would remove it. Name a path in it, such as {target / 'last.ckpt'}."
        )


def link(path: Path, target: Path) -> None:
    """Makes a path a relative symbolic link to a checkpoint, in place of what it was.

    A file is copied where a disk has no links, as Lightning does.
    """
    temporary = temporary_name(path)
    remove(temporary)
    try:
        temporary.symlink_to(os.path.relpath(target, path.parent))
    except OSError:
        shutil.copy(target, temporary)
    publish(temporary, path)


def move_links(target: Path, successor: Path) -> None:
    """Points the links beside a checkpoint that lead to it at another one, if both are there."""
    if target.is_symlink() or not (target.exists() and successor.exists()):
        return
    for path in target.parent.iterdir():
        if path.is_symlink() and os.path.realpath(path) == os.path.realpath(target):
            link(path, successor)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns False, with nothing changed, if it is impossible."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux; Python has no function
    here, flag = -100, 2  # AT_FDCWD of <fcntl.h>, RENAME_EXCHANGE of <linux/fs.h>
    first, second = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(here, first, here, second, flag) == 0


def flush(path: Path) -> None:
    """Waits until a file's contents, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def withdraw(target: Path) -> None:
    """Removes a checkpoint; at each instant its path is a whole checkpoint or does not exist."""
    temporary = temporary_name(target)
    remove(temporary)
    if os.path.lexists(target):
        target.rename(temporary)
    remove(temporary)
    remove(aside_name(target))


def remove(path: Path) -> None:
    """Removes a file, a link or a directory, if there is one.

    Raises:
        OSError: A part could not be removed; all others were.
    """
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)  # stops at its first error, and says what that is
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextmanager
def removed_on_failure(temporary: Path) -> Iterator[None]:
    """Returns a context manager that removes a save's temporary files if the save fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it would hide the other one
            remove(temporary)
        raise


def write(path: Path, write_to: Callable[[BinaryIO], object]) -> None:
    """Writes and flushes; torch's own writer, used for a path, hides the file system's errors."""
    with path.open("wb") as file:
        write_to(file)
        file.flush()
        os.fsync(file.fileno())


def describe_failure(path: str | os.PathLike[str], error: BaseException) -> str:
    """Returns a sentence on a save that an error has ended, with the free bytes of its disk."""
    if isinstance(error, NotSavedError):
        return str(error)
    error = storage_error(error) or error
    why = f"{type(error).__name__}: {error}".rstrip(".")
    failed = f"{os.fspath(path)} was not saved: {why}."
    if "://" in os.fspath(path):
        return failed
    with suppress(OSError):  # of a disk that is gone; it would hide the save's own error
        folder = next(p for p in Path(path).absolute().parents if p.is_dir())
        failed += f" {shutil.disk_usage(folder).free:,} bytes were free in {folder}."
    kept = " The checkpoint before is as it was." if os.path.lexists(path) else ""
    return failed + kept


def storage_error(error: BaseException) -> OSError | None:
    """Returns the file system's error that an error is, or by which it was caused, if any."""
    if isinstance(error, OSError):
        return error
    before = error.__cause__ or error.__context__
    return None if before is None else storage_error(before)

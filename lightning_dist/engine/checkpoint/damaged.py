"""Names the file where torch cannot read a checkpoint of one file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_damaged_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Returns a context manager in which torch reads a file.

    Raises:
        ValueError: The file is damaged, as one that was cut off.
    """
    try:
        yield
    except (EOFError, OSError, RuntimeError) as error:
        # Of an archive that is cut off, torch seeks ahead of the begin.
        is_sought = isinstance(error, OSError) and error.errno == errno.EINVAL
        if not (is_sought or isinstance(error, EOFError) or "PytorchStreamReader" in str(error)):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{os.fspath(path)} is no checkpoint, or is damaged, as by a copy that was cut off:"
            f" {reason}. Use another copy."
        ) from error

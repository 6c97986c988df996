"""Names the file where torch cannot read a checkpoint of one file."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# What torch raises of a text or of random bytes, which it takes for a pickle.
_OF_NO_PICKLE = (EOFError, LookupError, UnicodeDecodeError, struct.error)


@contextmanager
def naming_damaged_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Returns a context manager in which torch reads a file.

    Raises:
        ValueError: The file is damaged, as one that was cut off, or is no checkpoint.
    """
    try:
        yield
    except (*_OF_NO_PICKLE, OSError, RuntimeError) as error:
        # Of an archive that is cut off, torch seeks ahead of the begin.
        is_sought = isinstance(error, OSError) and error.errno == errno.EINVAL
        is_no_pickle = isinstance(error, _OF_NO_PICKLE)
        if not (is_sought or is_no_pickle or "PytorchStreamReader" in str(error)):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{os.fspath(path)} is no checkpoint, or is damaged, as by a copy that was cut off:"
            f" {reason}. Use another copy."
        ) from error

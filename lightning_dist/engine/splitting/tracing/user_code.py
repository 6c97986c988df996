"""Tells the user's code, and that of libraries that it calls, from torch's and this package's."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

_PACKAGE = Path(__file__).parents[3]
_NOT_THE_USERS = (Path(torch.__file__).parent, _PACKAGE, Path(sysconfig.get_path("stdlib")))
# Functions between a line of the user's and what asks: torch's own, and a hook for buffers.
_BETWEEN = ("__torch_function__", "__setattr__", "register_buffer", "no_new_buffer")


def is_the_users(filename: str) -> bool:
    """Returns whether a file of code is the user's, or of a library that the user calls."""
    path = Path(filename)
    return path.is_file() and not any(path.is_relative_to(home) for home in _NOT_THE_USERS)


def is_called_by_user() -> bool:
    """Returns whether a line of the user's code led to the caller, and none of torch's."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return is_the_users(frame.f_code.co_filename)


def users_line(found: TracebackType | None) -> str:
    """Names the innermost line of the user's own code in a traceback; empty if there is none."""
    for frame in reversed(traceback.extract_tb(found)):
        if is_the_users(frame.filename):
            return f" at {frame.filename}:{frame.lineno}, `{frame.line}`"
    return ""

"""Show a user's mistake once, and without the frames of this package and of Lightning.

A mistake is a ``ValueError`` that this package raises itself. Its text says what to type, so the
frames between the user's call and the check are of no use. Only the interpreter's output at the end
of the process is shorter: the exception keeps its traceback, for code that catches it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_OWN = "lightning_dist"
_HIDDEN = frozenset({_OWN, "lightning", "lightning_fabric", "pytorch_lightning"})


class BriefHook:
    """Stands in for ``sys.excepthook``.

    Only the mistake's text is kept, for its frames hold the model. ``otherwise`` shows any other
    exception.
    """

    def __init__(self, mistake: ValueError, otherwise: _Hook, *, is_shown_elsewhere: bool) -> None:
        self._text = str(mistake)
        self.otherwise = otherwise
        self._is_shown_elsewhere = is_shown_elsewhere

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows the exception that ends the process."""
        if str(error) != self._text or not is_mistake(error):
            self.otherwise(kind, error, trace)
        elif not self._is_shown_elsewhere:
            sys.stderr.write(format_mistake(error))
            sys.stderr.flush()


def is_mistake(error: BaseException) -> bool:
    """Returns whether an exception is a user's mistake: raised by this package, without a cause."""
    packages = [_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    has_reason = error.__cause__ is not None  # the cause may have frames that help
    return isinstance(error, ValueError) and not has_reason and packages[-1:] == [_OWN]


def format_mistake(error: BaseException) -> str:
    """Formats a traceback of the user's own frames."""
    frames = traceback.walk_tb(error.__traceback__)
    own = ((frame, line) for frame, line in frames if _package(frame) not in _HIDDEN)
    stack = traceback.StackSummary.extract(own).format()
    lines = ["Traceback (most recent call last):\n", *stack] if stack else []
    return "".join([*lines, *traceback.format_exception_only(error)])


def show_briefly(error: BaseException, *, is_shown_elsewhere: bool = False) -> None:
    """Lets the interpreter show a mistake briefly, and not if another rank shows it."""
    if isinstance(error, ValueError) and is_mistake(error):
        before = sys.excepthook
        otherwise = before.otherwise if isinstance(before, BriefHook) else before
        sys.excepthook = BriefHook(error, otherwise, is_shown_elsewhere=is_shown_elsewhere)


@contextmanager
def brief_mistakes() -> Iterator[None]:
    """Shows a mistake that is raised inside briefly, should it end this process."""
    try:
        yield
    except ValueError as error:
        show_briefly(error)
        raise


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

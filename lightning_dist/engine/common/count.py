"""A number of something that a user asks for."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real


def check_count(name: str, value: object, at_least: int = 1, *, instead: str = "") -> None:
    """Checks a number of things.

    Args:
        name: Of the argument.
        value: Its value.
        at_least: The least number.
        instead: What else it may be, such as ``"'auto'"``.

    Raises:
        ValueError: It is no integer of at least so much.
    """
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_number or value < at_least:  # type: ignore[operator]
        others = f"{instead} or " if instead else ""
        raise ValueError(f"{name}={value!r} must be {others}an integer of at least {at_least}.")


def check_positive(name: str, value: object) -> None:
    """Checks an amount.

    Args:
        name: Of the argument.
        value: Its value.

    Raises:
        ValueError: It is no finite number above zero.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise ValueError(f"{name}={value!r} must be a number above 0.")

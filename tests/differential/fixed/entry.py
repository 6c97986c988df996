"""A case of the test command."""

from __future__ import annotations

from dataclasses import dataclass

from tests.differential.case import Case


@dataclass(frozen=True)
class Fixed:
    """A case of the test command.

    Attributes:
        case: The case.
        refusal: A part of the message with which the strategy refuses it on each rank.
    """

    case: Case
    refusal: str | None = None

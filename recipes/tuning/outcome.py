"""What travels between a trial's training, its rank, and the study."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Order:
    """A trial to train.

    Attributes:
        number: Number of the trial.
        words: Options of ``recipes.train``.
        folder: Folder of the trial's own.
    """

    number: int
    words: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Report:
    """The objective at a validation, ahead of the end.

    Attributes:
        value: It.
        step: Number of validations before this one, of which an epoch may have several.
    """

    value: float
    step: int


@dataclass(frozen=True)
class Outcome:
    """What became of a trial, on a rank.

    Attributes:
        state: How it ended.
        values: Objectives, on the first rank.
        epochs: Epochs trained.
        error: Why it failed.
    """

    state: Literal["complete", "pruned", "failed"]
    values: dict[str, float] = field(default_factory=dict)
    epochs: int = 0
    error: str = ""

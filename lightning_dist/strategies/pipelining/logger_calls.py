"""Calls of loggers in a step, which the last stage makes and rank 0's loggers hear.

Loggers write on rank 0 only, and only the last stage runs a step to its end. So on stages that are
not on rank 0, ``self.logger`` in a step notes calls, such as ``self.logger.log_image(...)`` or
``self.logger.experiment.add_figure(...)``. They travel with the outcome of the batch, and rank 0
makes them then. Each micro-batch makes its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_dist.engine.tensors.tree import map_tensors

_Note = Callable[[tuple[str, ...], Any], None]


@dataclass(frozen=True, slots=True)
class LoggerCall:
    """A call of a logger, or of something that a logger has.

    Attributes:
        logger: Number of the logger.
        path: Names of attributes from the logger to what is called.
        arguments: The pickled arguments, by position and by name.
    """

    logger: int
    path: tuple[str, ...]
    arguments: bytes


class LoggerCalls:
    """Notes the calls of one stage's steps, and makes those of the last stage on rank 0.

    Args:
        trainer: The trainer, whose loggers are replaced in steps.
        is_source: Whether this rank is the last stage, of the replica with rank 0.
    """

    def __init__(self, trainer: pl.Trainer, *, is_source: bool) -> None:
        self._trainer = trainer
        self._is_source = is_source
        self._calls: list[LoggerCall] = []

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Replaces the loggers, unless this rank runs whole steps and its loggers write."""
        own = self._trainer.loggers
        if not own or (self._is_source and self._trainer.is_global_zero):
            yield
            return
        self._trainer.loggers = [
            cast("Logger", _Noting(logger, (), self._noted_for(number)))
            for number, logger in enumerate(own)
        ]
        try:
            yield
        finally:
            self._trainer.loggers = own

    def take(self) -> list[LoggerCall]:
        """Returns the calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def make(self, calls: Sequence[LoggerCall]) -> None:
        """Makes the last stage's calls, on rank 0."""
        for call in calls if self._trainer.is_global_zero else ():
            target: Any = self._trainer.loggers[call.logger]
            for name in call.path:
                target = getattr(target, name)
            args, kwargs = pickle.loads(call.arguments)
            target(*args, **kwargs)

    def _noted_for(self, number: int) -> _Note:
        def note(path: tuple[str, ...], arguments: Any) -> None:
            if not self._is_source:
                return  # this rank leaves the step early, or another replica's loggers are heard
            try:
                packed = pickle.dumps(map_tensors(_as_sent, arguments))
            except Exception as error:  # any class may raise anything
                raise ValueError(
                    f"`self.logger.{'.'.join(path)}(...)` in a step is made by rank 0, which gets"
                    f" its arguments from the last stage. They cannot be pickled: {error}. Log"
                    " tensors, numbers, texts or figures."
                ) from error
            self._calls.append(LoggerCall(number, path, packed))

        return note


class _Noting:
    """A logger, or a part of one, whose calls are noted.

    Args:
        real: What is there on this rank.
        path: Names of attributes from the logger to it.
        note: Takes the path and the arguments of a call.
    """

    def __init__(self, real: Any, path: tuple[str, ...], note: _Note) -> None:
        self._real = real
        self._path = path
        self._note = note

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real) if isinstance(self._real, Logger) else _Noting

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if callable(value) or name == "experiment":
            return _Noting(value, (*self._path, name), self._note)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._note(self._path, (args, kwargs))


def _as_sent(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()

"""What a step does on rank 0 only: calls of loggers, ``self.print``, ``if self.global_rank == 0``.

Only the last stage runs a step to its end. So where that is not rank 0, calls such as
``self.logger.log_image(...)`` and ``self.logger.experiment.add_figure(...)`` are noted there. They
travel with the outcome of the batch, and rank 0 makes them then. Each micro-batch makes its own.
In steps the two ranks are seen in each other's place, so code for rank 0 runs where the loss is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.tree import map_tensors

_Path = tuple[str | int, ...]
"""Names of attributes, and places in lists, from the module to what is called."""
RankZeroCall: TypeAlias = tuple[_Path, bytes]
"""What a step calls, and the pickled arguments."""


class RankZeroCalls:
    """Notes the calls of one stage's steps, and makes those of the last stage on rank 0.

    Args:
        module: The user's module; in steps it prints nothing, and its trainer has other loggers.
        is_source: Whether this rank is the last stage, of the replica with rank 0.
        as_seen: Creates the context manager in which a step sees this rank as another.
        as_itself: Creates the one in which loggers see this rank, or they would open files and
            runs for rank 0.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        is_source: bool,
        as_seen: Callable[[], AbstractContextManager[None]] = nullcontext,
        as_itself: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module = module
        self._is_source = is_source
        self._as_seen = as_seen
        self._as_itself = as_itself
        self._calls: list[RankZeroCall] = []

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Replaces what only rank 0 calls, unless this is rank 0 and runs whole steps."""
        trainer = self._module.trainer
        if self._is_source and trainer.is_global_zero:
            yield
            return
        own = trainer.loggers
        trainer.loggers = [
            cast("Logger", _NotingLogger(logger, ("loggers", number), self._note, self._as_itself))
            for number, logger in enumerate(own)
        ]
        undo = replace_method(self._module, "print", _Noting(("print",), self._note))
        try:
            with self._as_seen():
                yield
        finally:
            undo()
            trainer.loggers = own

    def take(self) -> list[RankZeroCall]:
        """Returns the calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def make(self, calls: Sequence[RankZeroCall]) -> None:
        """Makes the last stage's calls, on rank 0."""
        for path, packed in calls if self._module.trainer.is_global_zero else ():
            target: Any = self._module
            for step in path:
                target = target[step] if isinstance(step, int) else getattr(target, step)
            args, kwargs = pickle.loads(packed)
            target(*args, **kwargs)

    def _note(self, path: _Path, arguments: Any) -> None:
        if not self._is_source:
            return  # this rank leaves the step early, or is of a replica that is not heard
        try:
            packed = pickle.dumps(map_tensors(lambda tensor: tensor.detach().cpu(), arguments))
        except Exception as error:  # any class may raise anything
            named = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in path)
            raise ValueError(
                f"`self{named}(...)` in a step is made by rank 0, which gets its arguments from the"
                f" last stage. They cannot be pickled: {error}. Use tensors, numbers, texts or"
                " figures."
            ) from error
        self._calls.append((path, packed))


class _Noting:
    """Something of rank 0, such as an experiment, whose calls are noted; so are those of parts."""

    def __init__(self, path: _Path, note: Callable[[_Path, Any], None]) -> None:
        self._path = path
        self._note = note

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by which others ask what an object can do
            raise AttributeError(name)
        return _Noting((*self._path, name), self._note)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note((*self._path, "__setitem__"), ((key, value), {}))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._note(self._path, (args, kwargs))


class _NotingLogger:
    """A logger, whose calls and experiment are noted, and whose values are this rank's."""

    def __init__(
        self,
        real: Logger,
        path: _Path,
        note: Callable[[_Path, Any], None],
        as_itself: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._real = real
        self._path = path
        self._note = note
        self._as_itself = as_itself

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        noting = _Noting((*self._path, name), self._note)
        if name == "experiment":
            return noting
        with self._as_itself():
            value = getattr(self._real, name)
        return noting if callable(value) else value

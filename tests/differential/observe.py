"""What can be seen of a run from outside: hooks, logged values, outputs, files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_dist.checkpoint import is_sharded, load_full

Row = tuple[int | None, dict[str, float]]


@dataclass
class Observation:
    """What one rank saw of a run.

    Attributes:
        refusal: The message with which the run was refused, if it was.
        rows: Logged values, each with its step.
        events: Names of hooks in the order of their calls.
        outputs: The loss that ``on_train_batch_end`` got, for each batch.
        predictions: What ``predict_step`` returned, for each batch.
        metrics: ``callback_metrics`` behind the run.
        growth: Blocks of memory that each batch of a long run leaves behind.
        progress: Where the trainer stands behind the run, and what its callbacks found.
    """

    refusal: str | None = None
    rows: list[Row] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    growth: float = 0.0
    progress: dict[str, Any] = field(default_factory=dict)


class MemoryLogger(Logger):
    """Keeps what is logged on each rank.

    Args:
        rows: Where to.
    """

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self._rows = rows

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def _public_methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value) and name[0] != "_"}


CALLBACK_HOOKS = _public_methods(L.Callback)
MODULE_HOOKS = {
    name
    for kind in (ModelHooks, DataHooks)
    for name in _public_methods(kind)
    if not name.endswith("_dataloader") and name != "configure_sharded_model"
} | {"optimizer_step", "lr_scheduler_step", "configure_gradient_clipping", "optimizer_zero_grad"}


def recording(kind: Any, names: set[str], prefix: str, events: list[str]) -> Any:
    """Makes a subclass that notes the name of each hook that is called."""

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{prefix}.{name}")
            return method(*args, **kwargs)

        noted.__signature__ = signature(method)  # type: ignore[attr-defined]
        return noted

    return type(kind.__name__, (kind,), {name: noting(name) for name in names})


def files_in(folder: Path) -> dict[str, Any]:
    """Loads all checkpoints of a folder, by name; of other files there is the name."""
    return {path.name: _content_of(path) for path in sorted(folder.iterdir())}


def _content_of(path: Path) -> Any:
    if path.suffix != ".ckpt" or not (path.is_file() or is_sharded(path)):
        return None
    try:
        return load_full(path, weights_only=False)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        return f"cannot be loaded: {type(error).__name__}"

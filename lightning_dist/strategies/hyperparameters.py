"""The learning rate of step b belongs to update b, on each stage.

Under an asynchronous schedule a stage applies the update of a batch some batches after Lightning
has stepped the schedulers for it. So what a schedule can change (everything in a parameter group
but the parameters) is remembered for each batch and put in place for its update. The rate may be
smaller there, where the stage's weights are stale: Lightning and the schedulers never see that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_Groups = list[dict[str, Any]]


class HyperparameterHistory:
    """The parameter groups' values by batch.

    Args:
        delay: Batches between a batch and its update on this stage.
        rate_factor: Gives by what the present learning rates are multiplied; None leaves them, and
            optimizers that have none, alone.
    """

    def __init__(self, delay: int, rate_factor: Callable[[], float] | None = None) -> None:
        self._rate_factor = rate_factor
        self._history: deque[tuple[int, _Groups]] = deque(maxlen=delay + 1)

    def remember(self, batch_index: int, optimizer: Optimizer) -> None:
        """Keeps the present values.

        Args:
            batch_index: The batch that they belong to.
            optimizer: Whose groups to read.
        """
        values = _values(optimizer)
        if self._rate_factor is not None:
            for group in values:
                group["lr"] = group["lr"] * self._rate_factor()
        self._history.append((batch_index, values))

    @contextmanager
    def of_batch(self, batch_index: int, optimizer: Optimizer) -> Iterator[None]:
        """Puts the values of a batch in place for a while.

        What the optimizer itself changes meanwhile stays changed.

        Args:
            batch_index: The batch, one of the last ``delay + 1``.
            optimizer: Whose groups to write.

        Yields:
            Nothing.

        Raises:
            ValueError: The optimizer has got, or lost, a group since.
        """
        past = next(values for index, values in self._history if index == batch_index)
        present = _values(optimizer)
        if len(past) != len(present):
            raise ValueError(
                f"The optimizer has {len(present)} parameter groups, and had {len(past)} at the"
                " batch whose update is due: an asynchronous schedule applies it later. Give all"
                " groups to the optimizer in `configure_optimizers`, and freeze and unfreeze their"
                " parameters; or call `trainer.strategy.drain()` before you add one."
            )
        _install(optimizer, old=present, new=past)
        try:
            yield
        finally:
            _install(optimizer, old=past, new=present)


def _values(optimizer: Optimizer) -> _Groups:
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _install(optimizer: Optimizer, *, old: _Groups, new: _Groups) -> None:
    for group, before, after in zip(optimizer.param_groups, old, new, strict=True):
        for key, value in after.items():
            if not _equal(before[key], value) and _equal(group[key], before[key]):
                group[key] = value


def _equal(left: Any, right: Any) -> bool:
    return bool(left == right)

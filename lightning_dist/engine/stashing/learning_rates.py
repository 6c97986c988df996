"""The learning rate of step b belongs to update b, on each stage.

Under an asynchronous schedule a stage applies the update of a batch some batches after Lightning
has stepped the schedulers for it. Changes that a scheduler, a callback or the user makes to
parameter groups between two steps are recorded with the batch, and applied for its update. Values
that a step itself changes (``k`` of schedule-free optimizers, ``d`` of Prodigy) belong to no batch,
and stay. Between steps the groups show the newest values, since schedulers compute from them. If
the weights are stale, an update may use a smaller rate, which the schedulers never see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.engine.tensors.tree import flatten, map_tensors


@dataclass(frozen=True, slots=True)
class RateCorrection:
    """The correction of the learning rate of a stage whose weights are stale by tau updates.

    PipeMare (Yang et al., MLSys 2021, section 3.1): early in a training weights move the most, so a
    stage trains with ``rate / tau ** (1 - min(k / num_steps, 1))`` at update ``k``.

    Attributes:
        staleness: Updates between the weights of a batch and those that its update is added to.
        num_steps: Number of updates after which the correction ends.
    """

    staleness: int
    num_steps: int

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rate at an update of the training."""
        remaining = 1.0 - min(step / self.num_steps, 1.0)
        return float(max(self.staleness, 1) ** -remaining)


_Groups = list[dict[str, Any]]

_PARAMETERS = ("params", "param_names")
_CONTAINERS = (Tensor, list, tuple, dict)


@dataclass(slots=True)
class _Noted:
    """A batch's settings for its update: changed values by group, and a factor for the rate."""

    changes: _Groups
    rate_factor: float


class HyperparameterHistory:
    """The changes of parameter groups by batch, from the batch to its update.

    Args:
        rate_factor: Returns the factor of the present learning rates; None leaves rates unchanged,
            and allows optimizers without rates.
    """

    def __init__(self, rate_factor: Callable[[], float] | None = None) -> None:
        self._rate_factor = rate_factor
        self._noted: deque[_Noted] = deque()
        self._applied: _Groups = []
        self._shown: _Groups = []
        self._newest: _Groups = []  # changes after the newest batch

    def remember(self, optimizer: Optimizer) -> None:
        """Records the changes since the previous batch, for the update of a new batch.

        Raises:
            ValueError: The number of groups has changed since a batch without an update.
        """
        factor = 1.0 if self._rate_factor is None else self._rate_factor()
        if self._noted:
            self._note(optimizer)
        else:
            self._applied = group_values(optimizer)
            self._newest = [{} for _ in self._applied]
        self._noted.append(_Noted(self._newest, factor))
        self._shown = group_values(optimizer)
        self._newest = [{} for _ in self._shown]

    def _note(self, optimizer: Optimizer) -> None:
        before, present = len(self._shown), group_values(optimizer)
        if len(present) != before:
            raise ValueError(
                f"The optimizer has {len(present)} parameter groups, and had {before} at the batch"
                " whose update is due: an asynchronous schedule applies it later. Give all groups"
                " to the optimizer in `configure_optimizers`, and freeze and unfreeze their"
                " parameters; or call `trainer.strategy.drain()` before you add one."
            )
        _update(self._newest, changes_of_groups(self._shown, present))
        self._shown = present

    @contextmanager
    def of_next_update(self, optimizer: Optimizer) -> Iterator[None]:
        """Sets the groups to the values of the oldest batch without an update for a while.

        Changes that are made meanwhile persist.

        Raises:
            ValueError: The number of groups has changed since a batch without an update.
        """
        noted = self._noted[0]
        self._note(optimizer)
        _update(self._applied, noted.changes)
        used = [dict(values) for values in self._applied]
        for values in used if noted.rate_factor != 1.0 else ():
            values["lr"] = values["lr"] * noted.rate_factor
        install_values(optimizer, used)
        try:
            yield
        finally:
            _update(self._applied, changes_of_groups(used, group_values(optimizer)))
            noted.changes = [{} for _ in used]
            shown = [dict(values) for values in self._applied]
            for changes in (*[later.changes for later in self._noted], self._newest):
                _update(shown, changes)
            install_values(optimizer, shown)
            self._shown = group_values(optimizer)

    def end_update(self) -> None:
        """Removes the oldest batch, after its update."""
        self._noted.popleft()


def group_values(optimizer: Optimizer) -> _Groups:
    """Returns copies of the values in an optimizer's parameter groups, without the parameters."""
    return [
        {key: _copy_of(value) for key, value in group.items() if key not in _PARAMETERS}
        for group in optimizer.param_groups
    ]


def changes_of_groups(before: _Groups, after: _Groups) -> _Groups:
    """Returns the values that differ, or were missing before, for each group."""
    return [
        {k: v for k, v in new.items() if k not in old or not _are_equal(old[k], v)}
        for old, new in zip(before, after, strict=True)
    ]


def _copy_of(value: Any) -> Any:
    return map_tensors(torch.clone, value) if isinstance(value, _CONTAINERS) else value


def _are_equal(left: Any, right: Any) -> bool:
    if not (isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS)):
        return left is right or (type(left) is type(right) and bool(left == right))
    (own, skeleton), (others, other_skeleton) = flatten(left), flatten(right)
    return bool(skeleton == other_skeleton) and all(
        a.device == b.device and _are_alike(a, b) and torch.equal(a, b)
        for a, b in zip(own, others, strict=True)
    )


def _are_alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _update(groups: _Groups, changes: _Groups) -> None:
    for values, changed in zip(groups, changes, strict=True):
        values.update(changed)


@torch.no_grad()
def install_values(optimizer: Optimizer, groups: _Groups) -> None:
    """Sets values of an optimizer's parameter groups; tensors in place, where they fit."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if key in group and _are_equal(group[key], value):
                continue
            present = group.get(key)
            if not isinstance(present, Tensor) or not isinstance(value, Tensor):
                group[key] = _copy_of(value)
            elif _are_alike(present, value):
                # The optimizer may hold the tensor elsewhere too; a value may come from the host.
                present.copy_(value)
            else:
                group[key] = value.clone()

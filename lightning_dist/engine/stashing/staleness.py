"""The staleness of a stage's updates, measured at each update.

It is the number of updates between the weights that an update's forwards used and those that it is
added to: ``n - 1 - s`` under a full ``pipedream`` pipeline, 1 under ``pipedream_2bw``, 0 under a
synchronous schedule. On request the meter also measures how far the weights move meanwhile,
``||w_forward - w_now|| / ||w_now||``. That takes two passes over the parameters per update, waits
for a GPU, and keeps a batch's weights until then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_dist.engine.stashing.versions import WeightVersion


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """A stage's report of one update.

    Attributes:
        staleness: Updates between the weights of its forwards and those that it is added to.
        stash_bytes: Bytes held beyond the parameters while the optimizer writes.
        discrepancy: ``||w_forward - w_now|| / ||w_now||``; None if it is not measured.
    """

    staleness: int
    stash_bytes: int
    discrepancy: float | None = None


class StalenessMeter:
    """Compares the weights of forwards with those that their update is added to, on one stage.

    ``release`` is called with each version that is not needed any more.
    """

    def __init__(
        self,
        release: Callable[[WeightVersion], None],
        history: Iterable[int] = (),
        *,
        measures_discrepancy: bool = False,
    ) -> None:
        self._release = release
        self._measures_discrepancy = measures_discrepancy
        self._indices: dict[int, int] = {}
        self._kept: dict[int, list[WeightVersion]] = {}
        self._history = array("I", history)

    @property
    def history(self) -> tuple[int, ...]:
        """The staleness of each update so far."""
        return tuple(self._history)

    def end_backward(self, version: WeightVersion, update: int) -> None:
        """Records the version of a micro-batch for its update; of several the oldest counts."""
        self._indices[update] = min(version.index, self._indices.get(update, version.index))
        if self._measures_discrepancy:
            self._kept.setdefault(update, []).append(version)
        else:
            self._release(version)

    def measure(
        self, update: int, num_steps: int, parameters: Callable[[], Mapping[str, nn.Parameter]]
    ) -> tuple[int, float | None]:
        """Measures an update's staleness and discrepancy, right before the optimizer writes.

        The trainable parameters have seen ``num_steps`` updates.
        """
        staleness = num_steps - self._indices.pop(update, num_steps)
        self._history.append(staleness)
        if not self._measures_discrepancy:
            return staleness, None
        kept = self._kept.pop(update, [])
        discrepancy = 0.0
        if staleness:
            oldest = min(kept, key=lambda version: version.index)
            discrepancy = _discrepancy(oldest.seen, parameters())
        for version in kept:
            self._release(version)
        return staleness, discrepancy

    def clear(self) -> None:
        """Forgets the recorded versions, after a failure."""
        self._indices.clear()
        self._kept.clear()


@torch.no_grad()
def _discrepancy(weights: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> float:
    distance = get_total_norm([weights[name] - p for name, p in parameters.items()])
    if not distance:  # a stage without parameters has a norm of 0 as well
        return 0.0
    return float(distance / get_total_norm(list(parameters.values())))

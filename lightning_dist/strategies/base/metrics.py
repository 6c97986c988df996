"""The module's torchmetrics objects, reduced over the ranks whose values count.

Tensor-parallel ranks have all seen the same samples, so a metric is reduced over the ranks that
read different data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dist.engine.tensors.patch import Undo


class GroupGather:
    """Gathers a metric's states over some ranks: its ``dist_sync_fn`` during a run.

    Metrics are copied and pickled with all of their attributes, by ``clone()`` or among saved
    hyperparameters, and a process group can be neither. A copy shares this object, and a pickle has
    the function behind it.
    """

    def __init__(
        self, gather: Callable[..., list[Tensor]] | None, group: dist.ProcessGroup
    ) -> None:
        self._gather = gather or gather_all_tensors
        self._group: dist.ProcessGroup | None = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """Returns the state of each rank."""
        if group is not None or self._group is None:
            return self._gather(result, group=group)
        return [each.to(result.device) for each in self._gather(result.cpu(), group=self._group)]

    def __deepcopy__(self, memo: object) -> GroupGather:
        """Returns itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the function behind it, which needs this package no more."""
        return partial, (self._gather,)

    @property
    def is_open(self) -> bool:
        """Whether it still gathers over its ranks."""
        return self._group is not None

    def close(self) -> None:
        """Forgets the ranks: copies gather over all of them from now on."""
        self._group = None


def warn_of_rates(callbacks: Iterable[object], world_size: int, data_size: int) -> None:
    """Warns of Lightning's callback whose rates count the samples of a data replica several times.

    Args:
        callbacks: Callbacks of the Trainer.
        world_size: Number of ranks.
        data_size: Number of data replicas.
    """
    if any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
        rank_zero_warn(
            f"ThroughputMonitor counts the samples of each rank, and the {world_size} ranks have"
            f" those of {data_size} data replica{'s' * (data_size > 1)}. So its rates are"
            f" {world_size // data_size} times the true ones. StepProfiler counts each sample once."
        )


def metrics_of(callbacks: Iterable[object]) -> list[nn.Module]:
    """Lists the metrics that callbacks hold, in lists, dicts and modules, too."""
    held = (value for callback in callbacks for value in vars(callback).values())
    found: list[nn.Module] = []
    for value in held:
        inside = value.values() if isinstance(value, dict) else value
        several = inside if isinstance(value, dict | list | tuple) else [value]
        modules = (module for module in several if isinstance(module, nn.Module))
        found += [part for module in modules for part in module.modules()]
    return [metric for metric in dict.fromkeys(found) if isinstance(metric, Metric)]


def reduce_metrics_over(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> Undo:
    """Lets the metrics among some modules be reduced over some ranks, unless they have a group."""
    changed = []
    for metric in modules:
        if not isinstance(metric, Metric):
            continue
        own = metric.dist_sync_fn
        metric.dist_sync_fn = gather = GroupGather(own, group)
        changed.append((weakref.ref(metric), own, gather))  # hooks may replace it

    def undo() -> None:
        for reference, own, gather in changed:
            metric = reference()
            if metric is not None:
                metric.dist_sync_fn = own
            gather.close()

    return undo

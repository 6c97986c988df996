"""The module's torchmetrics objects, reduced over the ranks whose values count.

Only the last stage updates a metric, while Lightning, and the user's own hooks, read its value on
each rank. So while the pipeline is set up, ``compute`` of each metric of the module is a collective
of the pipeline. The last stage computes, and the other stages receive the result. Inside a step,
which only the last stage runs to its end, ``compute`` is unchanged. Tensor-parallel ranks have all
seen the same samples, so a metric is reduced over the ranks that read different data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dist.engine.tensors.patch import Undo
from lightning_dist.engine.tensors.tree import map_tensors


class GroupGather:
    """Gathers a metric's states over some ranks: its ``dist_sync_fn`` during a run.

    Metrics are copied and pickled with all of their attributes, by ``clone()`` or among saved
    hyperparameters, and a process group can be neither. A copy shares this object, and a pickle has
    the function behind it.

    Args:
        gather: The function that gathers, by default torchmetrics' own.
        group: The ranks, a gloo group, where the metric itself has no process group.
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

    def close(self) -> None:
        """Forgets the ranks: copies gather over all of them from now on."""
        self._group = None


def reduce_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> Undo:
    """Lets the metrics of a module be reduced over some ranks, unless they have a group.

    Args:
        module: The user's module.
        group: The ranks that read different data.
    """
    changed = [(m, m.dist_sync_fn) for m in module.modules() if isinstance(m, Metric)]
    gathers = []
    for metric, own in changed:
        gathers.append(GroupGather(own, group))
        metric.dist_sync_fn = gathers[-1]

    def undo() -> None:
        for (metric, own), gather in zip(changed, gathers, strict=True):
            metric.dist_sync_fn = own
            gather.close()

    return undo


class StageMetrics:
    """Shares the metrics of a module along the pipeline.

    Args:
        module: The user's module.
        pipeline_group: A gloo group of the stages of this replica.
        data_group: The ranks that hold this stage.
        source: Global rank of the last stage.
        is_source: Whether this rank is the last stage.
    """

    def __init__(
        self,
        module: nn.Module,
        pipeline_group: dist.ProcessGroup,
        data_group: dist.ProcessGroup,
        source: int,
        is_source: bool,
    ) -> None:
        self._pipeline_group = pipeline_group
        self._source = source
        self._is_source = is_source
        self._in_step = False
        self._originals: list[tuple[Metric, Callable[..., Any]]] = []
        self._undo = reduce_metrics_over(module, data_group)
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._originals.append((metric, metric.compute))
                metric.compute = self._shared(metric)  # type: ignore[method-assign]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Marks a step, which only the last stage runs to its end."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def detach(self) -> None:
        """Restores the metrics."""
        for metric, compute in self._originals:
            metric.compute = compute  # type: ignore[method-assign]
        self._originals.clear()
        self._undo()

    def _shared(self, metric: Metric) -> Callable[..., Any]:
        compute = metric.compute

        def shared_compute(*args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                return compute(*args, **kwargs)
            value = compute(*args, **kwargs) if self._is_source else None
            # From the host: a pickled tensor of a GPU would go to the GPU of that number.
            sent = [map_tensors(Tensor.cpu, value)]
            dist.broadcast_object_list(sent, src=self._source, group=self._pipeline_group)
            if self._is_source:
                return value
            return map_tensors(lambda tensor: tensor.to(metric.device), sent[0])

        return shared_compute

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
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_dist.engine.tensors.patch import Undo


def reduce_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> Undo:
    """Sets the process group of each metric of a module that has none, to be pickled again.

    Args:
        module: The user's module.
        group: The ranks that read different data.
    """
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
    for metric in metrics:
        metric.process_group = group

    def undo() -> None:
        for metric in metrics:
            metric.process_group = None

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
        self._originals: list[tuple[Metric, Callable[..., Any], Any]] = []
        for metric in module.modules():
            if isinstance(metric, Metric):
                self._originals.append((metric, metric.compute, metric.process_group))
                metric.compute = self._shared(metric.compute)  # type: ignore[method-assign]
                metric.process_group = data_group

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
        for metric, compute, process_group in self._originals:
            metric.compute = compute  # type: ignore[method-assign]
            metric.process_group = process_group
        self._originals.clear()

    def _shared(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def shared_compute(*args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                return compute(*args, **kwargs)
            value = [compute(*args, **kwargs) if self._is_source else None]
            dist.broadcast_object_list(value, src=self._source, group=self._pipeline_group)
            return value[0]

        return shared_compute

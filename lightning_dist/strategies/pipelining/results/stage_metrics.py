"""The module's torchmetrics objects as values of the whole pipeline.

Only the last stage updates a metric, while Lightning, and the user's own hooks, read its value on
each rank. So while the pipeline is set up, ``compute`` of each metric of the module is a collective
of the pipeline. The last stage computes, and the other stages receive the result. Inside a step,
which only the last stage runs to its end, ``compute`` is unchanged; so are those that another one
calls, as sums and wrappers of metrics do. Hooks may add metrics, as a ``MetricTracker`` does: those
are shared from the next batch on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_dist.engine.tensors.patch import Undo
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.base.metrics import GroupGather, reduce_metrics_over

_WINDOW = (
    "A step has updated a `Running` metric, and a step runs once for each micro-batch. So its"
    " window is of micro-batches. Update it in a hook, such as `on_train_batch_end`, or set"
    " num_microbatches=1."
)


class SharedCompute(partial[Any]):
    """``compute`` of a metric as a collective: :meth:`StageMetrics.value` of it and its own."""


class StageMetrics:
    """Shares the metrics of a module along the pipeline."""

    def __init__(
        self,
        module: nn.Module,
        pipelined: Collection[nn.Module],
        pipeline_group: dist.ProcessGroup,
        data_group: dist.ProcessGroup,
        source: int,
        is_source: bool,
    ) -> None:
        self._module = module
        self._pipelined = pipelined
        self._pipeline_group: dist.ProcessGroup | None = pipeline_group
        self._data_group: dist.ProcessGroup | None = data_group
        self._source = source
        self._is_source = is_source
        self._is_alone = False  # in what the last stage does without the others
        self._shared: list[weakref.ref[Metric]] = []
        self._undo: list[Undo] = []
        self._running = [m for m in module.modules() if isinstance(m, Running)]
        self._share(m for m in module.modules() if isinstance(m, Metric))

    def share_new(self) -> None:
        """Shares the metrics that hooks have added. Each stage calls it before each batch."""
        beside = self._module.named_modules(memo={*self._pipelined})
        self._share(m for _, m in beside if isinstance(m, Metric))

    @contextmanager
    def in_step(self, share: float) -> Iterator[None]:
        """Marks a step, which only the last stage runs to its end, on a share of its batch."""
        running = self._running if share < 1.0 and self._is_source else []
        before = [metric.metric_state for metric in running]
        with self._alone():
            yield
        if any(_differ(m.metric_state, old) for m, old in zip(running, before, strict=True)):
            self._running.clear()
            warnings.warn(_WINDOW, stacklevel=2)

    def value(self, metric: Metric, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a metric computes on the last stage. Collective outside of steps."""
        if self._is_alone:
            return own(*args, **kwargs)
        value = None
        if self._is_source:
            with self._alone():
                value = own(*args, **kwargs)
        # From the host: a pickled tensor of a GPU would go to the GPU of that number.
        sent = [map_tensors(Tensor.cpu, value)]
        with _explained():
            dist.broadcast_object_list(sent, src=self._source, group=self._pipeline_group)
        if self._is_source:
            return value
        return map_tensors(lambda tensor: tensor.to(metric.device), sent[0])

    def detach(self) -> None:
        """Restores the metrics."""
        for reference in self._shared:
            metric = reference()
            if metric is not None and isinstance(metric.compute, SharedCompute):
                _, metric.compute = metric.compute.args  # type: ignore[method-assign]
        self._shared.clear()
        self._running.clear()
        while self._undo:
            self._undo.pop()()
        # A metric that a hook has replaced is a cycle with this, freed later.
        self._pipeline_group = self._data_group = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        was_alone, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = was_alone

    def _share(self, metrics: Iterable[Metric]) -> None:
        new = [m for m in metrics if not isinstance(m.compute, SharedCompute)]
        if not new:
            return
        assert self._data_group is not None
        # A copy has its original's.
        over_all = [m for m in new if not _is_reduced(m)]
        self._undo.append(reduce_metrics_over(over_all, self._data_group))
        for metric in new:
            shared = SharedCompute(self.value, metric, metric.compute)
            metric.compute = shared  # type: ignore[method-assign]
            self._shared.append(weakref.ref(metric))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo, in words of its own
        error.add_note(
            "In a hook the last stage computes a metric for all ranks, so all call `compute()`:"
            " outside of `if self.trainer.is_global_zero`."
        )
        raise


def _is_reduced(metric: Metric) -> bool:
    return isinstance(metric.dist_sync_fn, GroupGather) and metric.dist_sync_fn.is_open


def _differ(states: dict[str, Any], before: dict[str, Any]) -> bool:
    return any(states[name] is not state for name, state in before.items())

"""torchmetrics objects on the module: reduced over the ranks that read different data.

By itself a metric is reduced over all ranks. Tensor-parallel ranks have all seen the same samples,
which would count several times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric


def reduce_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Makes each metric of a module, without a group of its own, reduce over one.

    Args:
        module: The user's module.
        group: The ranks that read different data.

    Returns:
        Undoes it, so that the metrics can be pickled again.
    """
    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
    for metric in metrics:
        metric.process_group = group

    def undo() -> None:
        for metric in metrics:
            metric.process_group = None

    return undo

"""Metrics can be copied and pickled while they are reduced over some ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dist.strategies.base.metrics import GroupGather, reduce_metrics_over

GROUP = cast("dist.ProcessGroup", "ranks 0 and 2")


def gather_twice(result: Tensor, group: Any = None) -> list[Tensor]:
    calls.append(group)
    return [result, result]


calls: list[Any] = []


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = MeanMetric(dist_sync_fn=gather_twice)
        self.others = MetricCollection({"plain": MeanMetric(), "grouped": MeanMetric()})


def test_copies_share_the_ranks_until_they_are_closed() -> None:
    calls.clear()
    module = Holder()
    undo = reduce_metrics_over(module.modules(), GROUP)
    copied = module.own.clone()
    gather: Any = copied.dist_sync_fn
    assert len(gather(torch.ones(1))) == 2
    gather(torch.ones(1), group="of the metric itself")
    undo()
    gather(torch.ones(1))
    assert calls == [GROUP, "of the metric itself", None]
    assert module.own.dist_sync_fn is gather_twice
    assert all(metric.dist_sync_fn is None for metric in module.others.values())


def test_a_pickle_has_the_function_behind() -> None:
    module = Holder()
    undo = reduce_metrics_over(module.modules(), GROUP)
    found = pickle.loads(pickle.dumps(module.others["plain"]))
    assert found.dist_sync_fn.func is gather_all_tensors
    assert isinstance(copy.deepcopy(module.others["plain"]).dist_sync_fn, GroupGather)
    found.update(3.0)
    assert found.compute() == 3.0
    undo()


def test_states_of_a_gpu_are_gathered_from_the_host() -> None:
    on_gpu, there, back = (Mock(name=name) for name in ("on_gpu", "there", "back"))
    on_gpu.cpu.return_value, there.to.return_value = there, back
    assert GroupGather(gather_twice, GROUP)(on_gpu) == [back, back]
    there.to.assert_called_with(on_gpu.device)

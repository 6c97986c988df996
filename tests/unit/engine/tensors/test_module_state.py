from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_dist.engine.tensors.module_state import state_kept


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.count = 0
        self.seen: list[Any] = [1, [2]]
        self.by_name: dict[str, Any] = {"a": torch.zeros(2)}
        self.newest: Any = deque([1], maxlen=2)
        self.names = {"x"}
        self.last = torch.ones(1)

    def step(self) -> None:
        self.norm(torch.arange(6.0).view(3, 2))
        self.mean.update(3.0)
        self.all.update(torch.ones(2))
        self.count += 1
        self.seen.append(3)
        self.seen[1].append(4)
        self.by_name["a"] += 1
        self.by_name["b"] = 2
        self.newest.append(5)
        self.names.add("y")
        self.last *= 3
        self.fresh = True


def test_a_step_leaves_nothing() -> None:
    module = Remembering()
    module.step()
    del module.fresh
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    seen, inner, last = module.seen, module.seen[1], module.last
    mean, everything = float(module.mean.compute()), module.all.compute().tolist()
    with state_kept(module):
        module.step()
        module.step()
        assert module.count == 3
    assert module.count == 1
    assert module.seen is seen == [1, [2, 4], 3]
    assert module.seen[1] is inner
    assert module.by_name["a"].tolist() == [1.0, 1.0]
    assert module.by_name.keys() == {"a", "b"}
    assert list(module.newest) == [1, 5]
    assert module.names == {"x", "y"}
    assert module.last is last
    assert last.item() == 3.0
    assert not hasattr(module, "fresh")
    assert float(module.mean.compute()) == mean
    assert module.mean.update_count == 1
    assert module.all.compute().tolist() == everything
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    module.step()
    assert module.count == 2
    assert module.norm.num_batches_tracked == 2


def test_a_step_that_fails_leaves_nothing_either() -> None:
    module = Remembering()

    def fail() -> None:
        with state_kept(module):
            module.step()
            raise RuntimeError("the step fails")

    with pytest.raises(RuntimeError, match="the step fails"):
        fail()
    assert module.count == 0
    assert module.norm.num_batches_tracked.item() == 0

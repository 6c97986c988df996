"""Attributes that users keep state in are found, and whatever a step changes there is seen."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_dist.engine.tensors.remote_tensor import absent, absent_value
from lightning_dist.strategies.pipelining.results.python_state import (
    attributes_of,
    can_be_sent,
    mark,
    modules_beside,
    set_attribute_of,
)


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Evaluator:
    def __init__(self) -> None:
        self.matrix = np.zeros((2, 2))
        self.meter = Meter()
        self.itself = self


class Helper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.inner = nn.ModuleList([nn.Linear(1, 1), nn.Module()])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Helper()
        self.helper = Helper()
        self.mean = MeanMetric()
        self.evaluator, self.slotted = Evaluator(), Slotted()
        self.function = print
        self._lightning_dist_part = Meter()


def named(module: Module) -> dict[str, Any]:
    return attributes_of(module, modules_beside(module, {module.model}))


def test_attributes_have_names_but_not_those_of_stages_and_metrics() -> None:
    module = Module()
    found = named(module)
    own = {"evaluator", "evaluator.matrix", "evaluator.meter", "evaluator.itself", "slotted"}
    own |= {"evaluator.meter.total", "evaluator.meter.count", "slotted.count", "helper.seen"}
    assert {*found} == own
    assert [*found].index("evaluator") < [*found].index("evaluator.matrix")
    module.evaluator.itself = None  # type: ignore[assignment]
    assert "evaluator.meter.total" in named(module)


def add_to_item(value: Any) -> None:
    value[7] += 1000
    value[7] += 1000  # the first sum is freed, and its place may be taken again


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "append": ([0], lambda v: v.append(1)),
    "item": ([1000] * 20, add_to_item),
    "item of many": ([1000] * 500, add_to_item),
    "end of too many": ([0] * 5000, lambda v: v.append(1)),
    "item of a dict": (dict.fromkeys(range(100), 1000.0), add_to_item),
    "key": ({1: 0}, lambda v: (v.pop(1), v.update({2: 0}))),
    "set": ({1}, lambda v: (v.pop(), v.add(2))),
    "deque": (deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "list of lists": ([[0], [0]], lambda v: v[1].append(1)),
    "tensor": (torch.zeros(2), lambda v: v.add_(1)),
    "list of tensors": ([torch.zeros(2)], lambda v: v[0].add_(1)),
    "array": (np.zeros(2), lambda v: v.__setitem__(0, 1)),
    "large array": (np.zeros((1000, 1000)), lambda v: v.__setitem__((3, 4), 1)),
    "object in a list": ([Meter()], lambda v: setattr(v[0], "count", 1)),
    "object in a dict": ({"a": Meter()}, lambda v: setattr(v["a"], "count", 1)),
    "array of an object": ([Evaluator()], lambda v: v[0].matrix.fill(1)),
    "slots": ([Slotted()], lambda v: setattr(v[0], "count", 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    value, change = CHANGES[name]
    before = mark(value)
    assert mark(value) == before
    change(value)
    assert mark(value) != before


def test_what_is_the_same_in_other_objects_is_no_change() -> None:
    value = [float("nan"), None, "text", nn.Linear(1, 1), print, np.ones(2), (1, [2])]
    assert mark(value) == mark(value)
    assert mark(np.zeros(2**20 + 1)) is None  # costs too much


def test_a_copy_fills_what_others_may_have_too() -> None:
    module = Module()
    matrix, counts = module.evaluator.matrix, defaultdict(int, a=1)
    module.counts = counts
    copies = {"evaluator.matrix": np.ones((2, 2)), "counts": defaultdict(int, b=2)}
    copies |= {"evaluator.meter.total": 1.5, "slotted.count": 3, "helper.seen": 4, "new": [5]}
    for name, value in {**copies, "absent.total": 1.0}.items():
        set_attribute_of(module, name, value)
    assert matrix.sum() == 4
    assert counts == {"b": 2}
    found = (module.evaluator.meter.total, module.slotted.count, module.helper.seen, module.new)
    assert found == (1.5, 3, 4, [5])
    assert not hasattr(module, "absent")
    set_attribute_of(module, "evaluator.matrix", np.ones(3))
    assert module.evaluator.matrix.shape == (3,)
    module.labels = labels = torch.zeros(3)
    set_attribute_of(module, "labels", torch.ones(3))
    assert labels.sum() == 3
    set_attribute_of(module, "labels", torch.zeros(3), is_new=True)
    assert (labels.sum(), module.labels.sum()) == (3, 0)
    set_attribute_of(module, "labels", torch.ones(4))
    assert module.labels.shape == (4,)


def test_functions_within_functions_cannot_be_sent() -> None:
    assert can_be_sent({"a": [Meter(), np.ones(2)]})
    assert not can_be_sent(lambda: None)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_tensor_of_another_rank_is_kept_at_any_depth(is_known: bool) -> None:
    like, reason = torch.ones(3, 2), "on rank 1"
    remote = absent(like, like.dtype, like.device, reason) if is_known else absent_value(reason)
    kept: Any = remote
    for _ in range(5):
        assert mark(kept) == mark(kept)
        kept = [kept]

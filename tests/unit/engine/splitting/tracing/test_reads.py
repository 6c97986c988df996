"""A graph is used as long as what the forward has read is what it was, and for no other sizes."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_dist.engine.splitting.tracing import program as trace_program
from lightning_dist.engine.splitting.tracing.reads import equal_state
from lightning_dist.engine.splitting.tracing.sequence import TracedLayers


class Two(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x))
        result: Tensor = self.second(self.between(hidden))
        return result

    def between(self, x: Tensor) -> Tensor:
        return x


@dataclass
class Rates:
    low: float = 1.0
    steps: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class ReadsPrivate(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self._rate


class ReadsOfClass(Two):
    rate = 1.0

    def between(self, x: Tensor) -> Tensor:
        return x * self.rate


class ReadsList(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self.rates[0] + self.rates[1]


class ReadsDict(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self.rates["low"]


class ReadsObject(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self.config.rate


class ReadsDeep(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self.config.rates.steps[1]


class ReadsTensor(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * self.rate


class ReadsNumberOfTensor(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * float(self.rate)


class ReadsMode(Two):
    def between(self, x: Tensor) -> Tensor:
        return x if self.drop.training else -x


class ReadsDictOfSelf(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * vars(self)["rate"]


class Calls(Two):
    def between(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(x)
        return result


class InBranch(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, lambda x: x * self.rate, lambda x: x - self.rate, (x,))
        return super().forward(x)


def put(name: str, value: Any) -> Callable[[Any], None]:
    path, _, last = name.rpartition(".")

    def change(module: Any) -> None:
        for part in filter(None, path.split(".")):
            module = getattr(module, part)
        setattr(module, last, value)

    return change


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (ReadsPrivate(_rate=1.0), put("_rate", 0.5)),
        (ReadsOfClass(), put("rate", 0.5)),
        (ReadsList(rates=[1.0, 2.0]), lambda module: module.rates.__setitem__(1, 3.0)),
        (ReadsList(rates=(1.0, 2.0)), put("rates", (0.5, 2.0))),
        (ReadsDict(rates={"low": 1.0}), lambda module: module.rates.update(low=0.5)),
        (ReadsObject(config=SimpleNamespace(rate=1.0)), put("config.rate", 0.5)),
        (ReadsObject(config=Slotted()), put("config.rate", 0.5)),
        (
            ReadsDeep(config=SimpleNamespace(rates=Rates())),
            lambda module: module.config.rates.steps.__setitem__(1, 0.5),
        ),
        (ReadsTensor(rate=torch.ones(())), lambda module: module.rate.data.fill_(0.5)),
        (ReadsTensor(rate=torch.ones(4)), put("rate", torch.arange(4.0))),
        (ReadsNumberOfTensor(rate=torch.ones(())), lambda module: module.rate.fill_(0.5)),
        (ReadsDictOfSelf(rate=1.0), put("rate", 0.5)),
        (Calls(activation=F.relu), put("activation", torch.tanh)),
        (
            Calls(activation=partial(F.leaky_relu, negative_slope=0.1)),
            put("activation", partial(F.leaky_relu, negative_slope=0.5)),
        ),
        (InBranch(rate=2.0), put("rate", 0.5)),
        (Two(), put("drop", nn.Dropout(1.0))),
        (ReadsMode(), lambda module: module.drop.eval()),
    ],
)
def test_a_change_of_what_is_read_is_followed(module: Two, change: Callable[[Any], None]) -> None:
    module = copy.deepcopy(module).train()
    original = copy.deepcopy(module)
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    TracedLayers(module, (x,), {})
    before = original(x)
    assert torch.equal(module(x), before)
    for each in (module, original):
        change(each)
    expected = original(x)
    assert not torch.equal(before, expected)
    assert torch.equal(module(x), expected)


class ReadsTrainer(Two):
    """Leaves a thing out of its copies, as a LightningModule does its trainer."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None}

    def between(self, x: Tensor) -> Tensor:
        return x * (self._trainer.epoch if self._trainer else 0)


class Uncopied:
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise TypeError("a file is open")


def test_what_cannot_be_copied_is_refused() -> None:
    x = torch.rand(3, 4)
    module = ReadsTrainer(_trainer=SimpleNamespace(epoch=3))
    with pytest.raises(ValueError, match=r"reads `_trainer`, a SimpleNamespace.*on_train_epoch_st"):
        TracedLayers(module, (x,), {})
    TracedLayers(Two(_trainer=threading.Lock), (x,), {})
    module = ReadsObject(config=SimpleNamespace(rate=1.0))
    TracedLayers(module, (x,), {})
    module.config = Uncopied()
    with pytest.raises(ValueError, match=r"reads `config`, a Uncopied.*cannot.*a file is open"):
        module(x)


def test_a_part_of_another_class_is_refused() -> None:
    module = Two()
    TracedLayers(module, (torch.rand(3, 4),), {})
    module.drop = nn.Identity()
    with pytest.raises(ValueError, match=r"\['drop'\] .* are not what they were"):
        module(torch.rand(3, 4))


class Small(Two):
    """Does something else for one sample, for one step of time and for none."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden[:, 0] * 3 if x.shape[1] == 1 else hidden.sum(1)
        result: Tensor = self.second(hidden if x.shape[0] > 1 else -hidden)
        return result


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the module was traced with."""
    shapes: list[tuple[int, ...]] = []

    def counted(structure: nn.Module, example: Any, **options: Any) -> Any:
        shapes.append(tuple(example.args[0].shape))
        return export(structure, example, **options)

    export = trace_program.export
    monkeypatch.setattr(trace_program, "export", counted)
    return shapes


def test_sizes_of_0_and_1_have_graphs_of_their_own(traced: list[tuple[int, ...]]) -> None:
    module = Small()
    original = copy.deepcopy(module)
    TracedLayers(module, (torch.ones(1, 5, 4),), {})
    assert traced == [(2, 5, 4)], "one sample is an example of many; training and eval are alike"
    for shape in ((3, 5, 4), (4, 6, 4), (1, 5, 4), (3, 1, 4), (1, 1, 4), (2, 0, 4), (5, 1, 4)):
        x = torch.randn(shape)
        assert torch.equal(module(x), original(x)), shape
    assert traced[1:] == [(1, 5, 4), (3, 1, 4), (1, 1, 4), (2, 0, 4)]


@pytest.mark.parametrize("class_", [Two, InBranch])
def test_what_is_not_read_is_not_compared(traced: list[tuple[int, ...]], class_: type[Two]) -> None:
    module = class_(rate=2.0, steps=0, seen=[])
    TracedLayers(module, (torch.ones(3, 4),), {})
    num_traces = len(traced)
    for _ in range(3):
        module.steps += 1
        module.seen.append(module(torch.ones(3, 4)).sum())  # with a graph, which is never copied
    assert len(traced) == num_traces


class CountsInMetric(Two):
    def between(self, x: Tensor) -> Tensor:
        self.mean.num_calls = 1
        return x


def test_methods_that_copies_wrap_anew_are_no_change() -> None:
    x = torch.randn(3, 4)
    module = Two(mean=MeanMetric(), means=MetricCollection({"of_steps": MeanMetric()}))
    original = copy.deepcopy(module)
    TracedLayers(module, (x,), {})
    assert torch.equal(module(x), original(x))
    with pytest.raises(ValueError, match=r"assigns \['mean.num_calls'\]"):
        TracedLayers(CountsInMetric(mean=MeanMetric()), (x,), {})


class AsksGradMode(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x


def test_the_grad_mode_that_the_forward_asks_for() -> None:
    module = AsksGradMode()
    original = copy.deepcopy(module)
    x = torch.randn(3, 4)
    TracedLayers(module, (x,), {})
    assert torch.equal(module(x), original(x))
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(module(x), original(x))
    assert torch.equal(module(x), original(x))
    assert module(x).requires_grad


def test_values_of_any_kind_are_compared() -> None:
    class Node:
        def __init__(self, value: Any) -> None:
            self.value, self.parent = value, self

    nan = float("nan")
    for value in (
        nan,
        [1, {"a": (2.0, None)}],
        {1, 2},
        Node([1]),
        logging.getLogger("any"),
        threading.Lock(),
        torch.device("cpu"),
        torch.tensor([1.0, nan]),
        partial(F.relu, inplace=True),
    ):
        try:
            copied = copy.deepcopy(value)
        except TypeError:
            copied = value
        assert equal_state(copied, value), value
    for kept, now in (
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({1}, {2}),
        (Node([1]), Node([2])),
        (F.relu, F.gelu),
        (partial(F.relu, inplace=True), partial(F.relu, inplace=False)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.float32, torch.float64),
        (None, 0),
    ):
        assert not equal_state(kept, now), (kept, now)


def test_a_recurrent_layer_s_references_to_its_weights_are_no_change() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
    assert equal_state([None], [weakref.ref(weight)])  # in a copy without values there are none
    assert equal_state([weakref.ref(weight)], [weakref.ref(other)])
    assert not equal_state([weight], [weakref.ref(weight)])
    assert not equal_state([], [weakref.ref(weight)])

"""What stands in the way of a trace is named, with its line and the fix."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.splitting.tracing.sequence import TracedLayers


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Branch(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


class Configures(Two):
    """Finds out at its first call what its parts, too, read in the configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=4, problem_type=None)
        self.first.config = self.config

    def forward(self, x: Tensor) -> Tensor:
        self.config.problem_type = "regression"
        return super().forward(x)


class Numpy(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * float(x.detach().numpy().sum())


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class OwnBackward(Two):
    def forward(self, x: Tensor) -> Tensor:
        return Triple.apply(self.first(x))


class Reentrant(Two):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.first, x, use_reentrant=True)


class Keeps(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x)
        return self.second(self.last)


class Counts(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class CountsPrivately(Two):
    def forward(self, x: Tensor) -> Tensor:
        self._count = getattr(self, "_count", 0) + 1
        return super().forward(x) * self._count


class Appends(Two):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class WritesPlainTensor(Two):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total.view(2, 2).mul_(2)
        return super().forward(x) + self.total


class AsksRequiresGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.first.weight.requires_grad else self.second(x)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))


class SetsBuffer(Mean):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class SetsData(Mean):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Between(Two):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.between = kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class FixedBatch(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.view(3, x.shape[1]))


class OtherOrder(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.first(self.second(x))


class WritesLateInEvaluation(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result = self.second(hidden)
        return result + (hidden if self.training else hidden.mul_(2))


class StochasticDepth(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if random.random() < 0.5 else super().forward(x)


class NumpyNoise(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.uniform())  # noqa: NPY002


class Hooked(Two):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("class_", "message", "line"),
    [
        (Branch, "torch.where", "if x.sum() > 0"),
        (Numpy, "numpy", "x.detach().numpy()"),
        (OwnBackward, "calls Triple, a torch.autograd.Function.*custom_op", "Triple.apply"),
        (Reentrant, "calls CheckpointFunction", "checkpoint(self.first"),
        (Keeps, r"assigns self\.last.*Return it", ""),
        (Counts, r"assigns \['count'\].*steps or hooks", ""),
        (CountsPrivately, r"assigns \['_count'\].*steps or hooks", ""),
        (Appends, r"assigns \['seen'\].*steps or hooks", ""),
        (Configures, r"assigns \['config\.problem_type'\].*before the run", ""),
        (WritesPlainTensor, r"writes into \['total'\].*`register_buffer`", ""),
        (
            AsksRequiresGrad,
            r"asks for `requires_grad`.*is_grad_enabled",
            "if self.first.weight.req",
        ),
        (
            partial(Between, SetsBuffer),
            r"sets the buffer 'mean' of a SetsBuffer.*copy_",
            "self.mean = 0.9 *",
        ),
        (
            partial(Between, SetsData),
            "sets the data of a tensor.*copy_",
            "self.mean.data = 0.9 *",
        ),
        (FixedBatch, r"batch size for a constant, 3 .*x\.shape\[0\]", ""),
        (OtherOrder, r"'first\.weight' earlier in training", ""),
        (WritesLateInEvaluation, "written to in place.*apart in training", "hidden.mul_(2)"),
        (Hooked, r"\['second'\] have forward hooks", ""),
        (StochasticDepth, "draws numbers by `random`.*torch.where", ""),
        (NumpyNoise, r"or `numpy\.random`, which a graph would repeat", ""),
    ],
)
def test_is_refused(class_: Callable[[], nn.Module], message: str, line: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TracedLayers(class_(), (torch.ones(3, 4),), {})
    if line:
        text = str(caught.value)
        assert line in text
        assert Path(__file__).name in text


class Sized(Two):
    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
        hidden = self.first(x) if x.shape[1] > 4 else super().forward(x)
        return hidden * scale if y is None else hidden + y


@pytest.fixture(scope="module")
def sized() -> nn.Module:
    class Long(Sized):
        def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
            return super().forward(x, y, scale).mean(1)

    module = Long()
    TracedLayers(module, (torch.ones(3, 6, 4),), {})
    return module


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2, 6, 5),), r"x has shape \(2, 6, 5\).*takes \(any, any, 4\)"),
        ((torch.ones(2, 6, 4).double(),), r"torch.float64 .*torch.float32"),
        ((torch.ones(2, 3, 4),), r"sizes for which its graph is not made.*is wrong"),
        ((torch.ones(2, 6, 4), None, 3.0), r"scale=3\.0 .* but 2\.0 in the example"),
        ((torch.ones(2, 6, 4), torch.ones(2)), r"y=tensor.* but None in the example"),
        ((), r"do not go with `forward\(x.*missing"),
    ],
)
def test_a_call_that_the_graph_is_not_made_for(
    sized: nn.Module, args: tuple[Any, ...], message: str
) -> None:
    assert sized(torch.ones(1, 7, 4)).shape == (1, 4)
    with pytest.raises(ValueError, match=message):
        sized(*args)


class OpenKeywords(Two):
    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return super().forward(x)


def test_keywords_that_the_forward_does_not_name() -> None:
    TracedLayers(OpenKeywords(), (torch.rand(2, 4),), {})
    with pytest.raises(ValueError, match=r"gives 'labels', 'scale' to the forward's `\*\*more`"):
        TracedLayers(OpenKeywords(), (torch.rand(2, 4),), {"labels": torch.ones(2), "scale": 2.0})


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(4, 4, batch_first=batch_first), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x)[0])
        return out


def test_recurrent_layers_fix_the_length_and_may_take_time_first() -> None:
    module = Recurrent(batch_first=True)
    TracedLayers(module, (torch.rand(3, 5, 4),), {})
    module(torch.rand(2, 5, 4))
    with pytest.raises(ValueError, match="nn.GRU and nn.RNN get: .* pad all batches to one length"):
        module(torch.rand(3, 6, 4))
    with pytest.raises(ValueError, match=r"`batch_first=False`\), lay batches out as \[samples"):
        TracedLayers(Recurrent(batch_first=False), (torch.rand(3, 5, 4),), {})


def test_a_hook_that_comes_after_the_trace() -> None:
    module = Two()
    TracedLayers(module, (torch.rand(3, 4),), {})
    handle = module.second.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"\['second'\] have forward hooks"):
        module(torch.rand(2, 4))
    handle.remove()
    module(torch.rand(2, 4))

"""The two parts of a backward are the whole one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lightning_dist.engine.pipeline.split_backward import SplitBackward
from tests.helpers.networks.models import ConvLayer


class Shared(nn.Module):
    """Uses one weight twice, and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Tied(nn.Module):
    """Uses one weight twice, with another layer between, each time with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(torch.tanh(self.first(x)))))


class Braided(nn.Module):
    """Uses weights again and again, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.w = (nn.Parameter(torch.randn(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.tanh(x * self.u) * self.v) * self.u * self.w) * self.v


class Pieces(nn.Module):
    """Has nodes with several outputs, and uses some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.weights = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        first, second, _ = self.weights.unbind()
        return torch.tanh(left * first) + right * second * left


class Beside(nn.Module):
    """Gives a second output that depends on weights only, and may use it in the first."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.is_used = is_used

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(self.scale)
        y = self.linear(x)
        return (y * scale if self.is_used else y), scale


class Stop(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Stopped(nn.Module):
    """Uses a weight where no gradient arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.behind = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + Stop.apply(self.behind(x))


class Hooked(nn.Module):
    """Changes a gradient where a weight's joins the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: 3 * gradient)
        return torch.tanh(y)


class Twice(nn.Module):
    """Gives what it makes more of, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return y, self.linear(y), self.linear.bias


STAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(ConvLayer(), ConvLayer()),
    "ends in a view": lambda: nn.Sequential(ConvLayer(), nn.Flatten()),
    "no parameters": nn.Flatten,
    "a weight used twice": Shared,
    "a layer between two uses": Tied,
    "weights in turns": Braided,
    "several outputs of a node": Pieces,
    "an output beside the chain": lambda: Beside(is_used=False),
    "an output that joins the chain": lambda: Beside(is_used=True),
    "a gradient that ends": Stopped,
    "a gradient that a hook changes": Hooked,
    "an output behind an output": Twice,
    "dropout": lambda: nn.Sequential(ConvLayer(dropout=0.5), nn.ReLU(inplace=True)),
}


def prepared(name: str, *, first: bool) -> tuple[nn.Module, Tensor, list[Tensor]]:
    torch.manual_seed(1)
    stage = STAGES[name]().double()
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=not first)
    y = stage(x * 1)
    return stage, x, [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]


@pytest.mark.parametrize("first", [True, False], ids=["first stage", "later stage"])
@pytest.mark.parametrize("name", STAGES)
def test_both_parts_are_the_whole(name: str, first: bool) -> None:
    stage, x, outputs = prepared(name, first=first)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    expected, wanted_input = [p.grad for p in stage.parameters()], x.grad

    stage, x, outputs = prepared(name, first=first)
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # of an earlier batch
    inputs = [] if first else [x]
    parted = SplitBackward(
        outputs, [torch.ones_like(t) for t in outputs], inputs, dict(stage.named_parameters())
    )
    found_inputs = parted.run_inputs()
    assert all(bool((p.grad == 7.0).all()) for p in stage.parameters())
    parted.run_weights()
    assert len(found_inputs) == len(inputs)
    for actual in found_inputs:
        assert (actual is None) == (wanted_input is None)
        if actual is not None:
            torch.testing.assert_close(actual, wanted_input, rtol=0, atol=1e-14)
    for parameter, wanted in zip(stage.parameters(), expected, strict=True):
        total = torch.full_like(parameter, 7.0) + (0.0 if wanted is None else wanted)
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-14)
    assert x.grad is None
    assert all(p.requires_grad for p in stage.parameters())


def test_what_the_second_part_does_not_need_goes_with_the_first() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(weakref.ref(tensor))
        return tensor

    x = torch.randn(2, 6, requires_grad=True)
    linear = nn.Linear(6, 6)
    loss = keep(linear(x).exp()).sum()  # the node of `exp` has its output
    parameters = dict(linear.named_parameters())
    parted = SplitBackward([loss], [torch.ones(())], [x], parameters)
    parted.run_inputs()
    assert kept[0]() is None
    assert loss.grad_fn is None
    parted.run_weights()
    assert all(parameter.grad is not None for parameter in linear.parameters())


def test_the_first_part_computes_no_gradients_of_weights() -> None:
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen.append("weight")
            return gradient

    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    y = torch.tanh(x @ Watched.apply(weight))
    parted = SplitBackward([y], [torch.ones_like(y)], [x], {"weight": weight})  # type: ignore[dict-item]
    parted.run_inputs()
    assert seen == []
    parted.run_weights()
    assert seen == ["weight"]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_backward_of_compiled_layers_runs_once_for_both_parts(is_tied: bool) -> None:
    runs: list[str] = []

    def forward(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: Any, _: Any) -> Any:
        def run(*given: Any) -> Any:
            runs.append("backward")
            return graph(*given)

        return make_boxed_func(run)

    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*(Dense() for _ in range(4)))
    if is_tied:
        net[3].linear.weight = net[2].linear.weight
    x, gradient = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6)
    expected = torch.autograd.grad(net(x), [x, *net.parameters()], gradient)
    for layer in net[1:]:
        layer.compile(backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    for _ in range(2):
        runs.clear()
        net.zero_grad()
        output = net(x)
        node = weakref.ref(output.grad_fn)
        parted = SplitBackward([output], [gradient], [x], dict(net.named_parameters()))
        found = parted.run_inputs()
        assert node() is None
        assert all(p.grad is None for p in net.parameters())
        parted.run_weights()
        assert len(runs) == 3
        actual = [*found, *(p.grad for p in net.parameters())]
        torch.testing.assert_close(actual, list(expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_weight_of_a_compiled_layer_and_of_another_one() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*(Dense() for _ in range(3)))
    net[2].linear.weight = net[0].linear.weight
    x, gradient = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6)
    expected = torch.autograd.grad(net(x), [x, *net.parameters()], gradient)
    net[0].compile(backend="aot_eager")
    net[1].compile(backend="aot_eager")
    parted = SplitBackward([net(x)], [gradient], [x], dict(net.named_parameters()))
    found = parted.run_inputs()
    parted.run_weights()
    actual = [*found, *(p.grad for p in net.parameters())]
    torch.testing.assert_close(actual, list(expected))

"""What is compiled around a pipelined module, and inside it, when its forward is replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.compiler import PausedCompiler, keep_saved_tensors

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Left(BaseException):  # noqa: N818
    """Leaves a step."""


class Net(nn.Sequential):
    """A sequence whose forward runs its layers in code that cannot be traced."""

    def __init__(self, *, leaves: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.compiler = PausedCompiler()
        self.layers = (nn.Sequential(*self),)
        self.leaves = leaves
        self.outputs: list[Tensor] = []
        self.traced: list[bool] = []
        self.forward = self.compiler.pause(self.run)  # type: ignore[method-assign]

    def run(self, x: Tensor) -> Tensor:
        self.traced.append(torch.compiler.is_compiling())
        self.outputs.append(self.compiler.resume(self.layers[0], x))
        if self.leaves:
            raise Left
        return self.outputs[-1]


class Graphs:
    """Stands for a compiler; counts the operations of each graph."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, _: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph


def compiled(how: str, net: Net, graphs: Graphs) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    if how == "in place":
        net.compile(backend=graphs, fullgraph=True)
        return net
    if how == "wrapped":
        return torch.compile(net, backend=graphs)  # type: ignore[no-any-return]
    return torch.compile(lambda x: net(x.relu()).relu(), backend=graphs)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("how", ["in place", "wrapped", "around"])
def test_the_layers_are_one_graph_and_the_code_around_them_is_in_none(
    how: str, leaves: bool
) -> None:
    net, graphs = Net(leaves=leaves), Graphs()
    call = compiled(how, net, graphs)
    for _ in range(2):
        try:
            call(X)
        except Left:
            assert leaves
    x = X.relu() if how == "around" else X
    assert [torch.equal(output, net.layers[0](x)) for output in net.outputs] == [True, True]
    assert net.traced == [False, False]
    assert graphs.sizes == {"around": [1, 3] if leaves else [1, 3, 1]}.get(how, [3])
    assert not net.compiler.is_paused


def test_a_graph_around_all_of_it_is_refused_with_what_to_do() -> None:
    net = Net()
    torch.compiler.reset()
    call = torch.compile(lambda x: net(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="Compile the layers one by one"):
        call(X)


def test_without_a_compiler_all_runs_as_it_is() -> None:
    net = Net()
    assert torch.equal(net(X), net.layers[0](X))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_compiled_backward_that_has_freed_its_graph_may_keep_it_the_next_time() -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    call = torch.compile(lambda x: net(x), backend="aot_eager_decomp_partition")

    def gradient(*, keeps: bool) -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(call(x).sum(), x, retain_graph=keeps)[0]

    with keep_saved_tensors(True):
        first = gradient(keeps=False)
        assert torch.equal(gradient(keeps=True), first)


def test_a_batch_leaves_no_context_variable() -> None:
    before = torch._functorch.config.donated_buffer
    counts = []
    for _ in range(3):
        with keep_saved_tensors(True):
            assert torch._functorch.config.donated_buffer is False
        counts.append(len(copy_context()))
    assert counts[0] == counts[-1]
    assert torch._functorch.config.donated_buffer is before


def test_while_it_stays_paused_hooks_on_layers_run() -> None:
    net, graphs, seen = Net(), Graphs(), []
    call = compiled("wrapped", net, graphs)
    call(X)
    net.compiler.stays_paused = True
    handle = net[1].register_forward_hook(lambda *_: seen.append("called"))
    call(X)
    handle.remove()
    net.compiler.stays_paused = False
    call(X)
    assert seen == ["called"]
    assert graphs.sizes == [3]

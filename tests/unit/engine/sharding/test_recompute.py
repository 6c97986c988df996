"""Which modules are computed again, where some are inside of others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_dist.engine.sharding.recompute import checkpoint_activations, choose_recomputed
from recipes.gpt import Block


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(Block(8, 2, 0.0) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


BLOCKS = ["net.blocks.0", "net.blocks.1"]
PARTS = [name for name, _ in Block(8, 2, 0.0).named_modules() if name]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([], []),
        (["net"], ["net"]),
        (BLOCKS, BLOCKS),
        (["net", *BLOCKS], BLOCKS),
        (["net", "net.embed", *BLOCKS], ["net.embed", *BLOCKS]),
        (["net", BLOCKS[0]], ["net"]),
        (["net", "net.head", "net.head.0", "net.head.1"], ["net"]),
        ([*BLOCKS, *(f"{block}.{part}" for block in BLOCKS for part in PARTS)], BLOCKS),
        (["net.blocks.1", "net.blocks.10"], ["net.blocks.1", "net.blocks.10"]),
    ],
)
def test_the_outermost_ones_but_for_those_of_several_blocks(
    names: list[str], chosen: list[str]
) -> None:
    root = nn.ModuleDict({"net": Model()})
    root["net"].blocks.extend(Block(8, 2, 0.0) for _ in range(9))
    assert choose_recomputed(root, names) == [root.get_submodule(name) for name in chosen]


class PartlyCompiled(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.squash = torch.compile(torch.tanh, backend=backend, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.squash(self.second(self.first(x).relu()))
        return result


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at one
@pytest.mark.parametrize("keep_products", [False, True])
def test_compiled_parts_stay_compiled(keep_products: bool) -> None:
    runs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph(*args)

        return run

    torch.compiler.reset()
    module, x = PartlyCompiled(backend), torch.randn(3, 4)
    module(x).sum().backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    checkpoint_activations([module], keep_products=keep_products)
    module(x).sum().backward()
    assert len(runs) == 3  # and in the recomputation
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


class Counts(nn.Module):
    """Reads and writes a buffer, replaces one, fills an empty one and registers one more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.first is None:
            self.first = x.detach()[0]
            self.register_buffer("late", x.detach()[1])
            x = 2 * x
        result: Tensor = self.linear(x.tanh() * float(self.count) - self.mean).tanh()
        return result


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
        Counts,
    ],
    ids=["running statistics", "spectral norm", "counts"],
)
def test_buffers_are_written_once(make: Any, keep_products: bool) -> None:
    torch.manual_seed(0)
    plain = make().double()
    again = copy.deepcopy(plain)
    checkpoint_activations([again], keep_products=keep_products)
    batches = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    for module in (plain, again):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for first, second in batches:
            # Two calls, of which the first is run again behind the second.
            (module(first) * module(second)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = again.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)

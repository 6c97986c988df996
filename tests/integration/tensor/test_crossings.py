"""What is apart must be put together on its way to a loss, or the first step says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensors.dtensor import whole
from tests.helpers.processes.workers import WorkerPool
from tests.integration.tensor.test_spread import ranks

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 16), nn.PReLU(), nn.Linear(16, WIDTH)
        self.slope: Any = None

    def forward(self, x: Tensor, more: Any = 0.0) -> Tensor:
        hidden = torch.tanh(self.up(x)) + more
        self.slope = hidden.mean()
        summed: Tensor = self.down(hidden)
        return summed


class Steep(Mlp):
    def forward(self, x: Tensor, more: Any = 0.0) -> Tensor:
        summed: Tensor = self.down(self.act(self.up(x)))
        return summed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor, more: Any = 0.0) -> Tensor:
        mixed: Tensor = x + self.mlp(self.norm(x) + more)
        return mixed


class Model(nn.Module):
    """``run`` says what the loss is."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], part: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.run = run
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed, self.between = nn.Embedding(6, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(part() for _ in range(2))
        self.double()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self, self.embed(tokens) * self.scale)


def penalised(model: Any, x: Tensor) -> Tensor:
    loss = model.body(x).pow(2).mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.pow(2).sum()


def deep(model: Any, x: Tensor) -> Tensor:
    first = model.blocks[0](x)
    return model.blocks[1](first).pow(2).mean() + first.pow(2).mean()


def hooked(model: Any, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.blocks[0].up.register_forward_hook(lambda *given: seen.append(given[-1]))
    loss = model.body(x).pow(2).mean() + seen[0].pow(2).mean()
    handle.remove()
    return loss


def plain(model: Any, x: Tensor) -> Tensor:
    return model.body(x).pow(2).mean()


def zigzag(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(block(x))
    return x.pow(2).mean()


Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module], dict[str, str], str]
MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
REGION: dict[str, Case] = {
    "fine": (plain, Mlp, MLP, ""),
    "a slope in the loss": (penalised, Mlp, MLP, ""),
    "an attribute": (
        lambda m, x: plain(m, x) + m.blocks[1].slope,
        Mlp,
        MLP,
        "features of 'blocks.1.up' by a way around",
    ),
    "a hook": (hooked, Mlp, MLP, "features of 'blocks.0.up' by a way around"),
    "some of the layers": (
        lambda m, x: plain(m, x) + F.softmax(m.blocks[0].up(x), -1)[..., 0].sum(),
        Mlp,
        MLP,
        "features of 'blocks.0.up' by a way around",
    ),
    "a parameter inside": (plain, Steep, MLP, "act.weight' meets each rank's own"),
    "a local parameter": (plain, Steep, {**MLP, "blocks.*.act": "local"}, ""),
    "a local parameter outside": (
        lambda m, x: plain(m, m.between(x)),
        Mlp,
        {**MLP, "between": "local"},
        "'between.weight', which is to meet each rank's own features, meets the same",
    ),
    "a parameter handed in": (
        lambda m, x: m.blocks[1](m.blocks[0](x, m.scale.sum())).pow(2).mean(),
        Mlp,
        MLP,
        "'scale' meets each rank's own",
    ),
}
SEQUENCE: dict[str, Case] = {
    "fine": (plain, Block, {}, ""),
    "a slope in the loss": (penalised, Block, {}, ""),
    "what a block returns": (deep, Block, {}, "depends on a part of the sequence"),
    "a norm between blocks": (
        lambda m, x: m.blocks[1](m.between(m.blocks[0](x))).pow(2).mean(),
        Block,
        {},
        "'between.weight' meets a part of the sequence",
    ),
    "a second activation": (
        lambda m, x: m.blocks[1](m.blocks[0](x), m.scale).pow(2).mean(),
        Block,
        {},
        "'scale' meets a part of the sequence",
    ),
    "a norm of a block outside": (
        lambda m, x: m.blocks[1].norm(m.body(x)).pow(3).mean(),
        Block,
        {},
        "'blocks.1.norm.weight', which meets a part of the sequence",
    ),
    "blocks out of order": (zigzag, Block, {}, "Call them in order"),
}


def found_in(case: str, mesh: DeviceMesh, of_sequence: bool) -> str | float:
    run, part, plan, _ = (SEQUENCE if of_sequence else REGION)[case]
    alone, together = Model(run, part), Model(run, part)
    if of_sequence:
        plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise_scatter"}
    styles = resolve_plan(together, plan)
    sharded = TensorParallelModule(together, styles, mesh, sequence_parallel=of_sequence)
    tokens = torch.arange(8).view(2, 4) % 6
    try:
        loss = together(tokens)
        sharded.check_graph([loss])
    except ValueError as error:
        return str(error)
    alone(tokens).backward()
    loss.backward()
    sharded.add_gradients()
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]
    return max(float((whole(a) - b).abs().max()) for a, b in gradients)


def found(of_sequence: bool) -> dict[str, str | float]:
    mesh = ranks()
    cases = SEQUENCE if of_sequence else REGION
    return {case: found_in(case, mesh, of_sequence) for case in cases}


@pytest.fixture(scope="module")
def all_found(workers: WorkerPool) -> dict[bool, list[dict[str, Any]]]:
    return {of_sequence: workers.run(2, found, of_sequence) for of_sequence in (False, True)}


@pytest.mark.parametrize(
    ("of_sequence", "case"),
    [(False, case) for case in REGION] + [(True, case) for case in SEQUENCE],
)
def test_what_is_right_is_equal_and_what_is_not_is_refused(
    all_found: dict[bool, list[dict[str, Any]]], of_sequence: bool, case: str
) -> None:
    *_, message = (SEQUENCE if of_sequence else REGION)[case]
    first, second = (of_rank[case] for of_rank in all_found[of_sequence])
    if message:
        assert message in first
        assert first == second
    else:
        assert max(first, second) < 1e-12


def compiled() -> float:
    alone, together = Model(plain, Steep), Model(plain, Steep)
    styles = resolve_plan(together, {**MLP, "blocks.*.act": "local"})
    sharded = TensorParallelModule(together, styles, ranks())
    for block in together.blocks:
        block.compile(backend="eager")
    tokens = torch.arange(8).view(2, 4) % 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        loss = together(tokens)
    sharded.check_graph([loss])
    return abs(loss.item() - alone(tokens).item())


def test_a_graph_that_a_compiler_has_made_is_left_alone(workers: WorkerPool) -> None:
    assert max(workers.run(2, compiled)) < 1e-12

"""Plans that do not fit their module end in an error of ours, on all ranks alike.

Before the first batch, where a copy of the module can be run with vectors or sequences; in the
first step where only the user's own batch will do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import TensorParallelStrategy
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

WIDTH, HIDDEN, ROWS = 8, 16, 6
PAIR = {"fc1": "colwise", "fc2": "rowwise"}


class Trained(L.LightningModule):
    num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MLP(Trained):
    """Has its layers as attributes, as the first example of every tutorial."""

    def __init__(self, between: nn.Module | None = None, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, HIDDEN)
        self.between = between or nn.ReLU()
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.fc2(self.between(self.fc1(x.flatten(1))))))


class Net(Trained):
    """Has them in a module of its own."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), between, nn.Linear(HIDDEN, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1))


class CNN(Trained):
    """Takes nothing but images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc1, self.fc2 = nn.Linear(32, HIDDEN), nn.Linear(HIDDEN, ROWS)
        self.between = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.conv(x)).relu().flatten(1)
        return self.fc2(self.between(self.fc1(features)))


class Tied(Trained):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.flatten(1) > 0).long()).mean(1))


class Mixing(nn.Module):
    """Computes with all hidden features, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        hidden = self.fc1(x).relu()
        return self.fc2(hidden if scale is None else scale * F.normalize(hidden, dim=-1))


class Optional(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = Mixing(), nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x.flatten(1), scale=2.0))


def frozen(module: L.LightningModule) -> L.LightningModule:
    module.fc1.requires_grad_(False)
    module.fc2.requires_grad_(False)
    return module


Case = tuple[Callable[[], L.LightningModule], Any, str]

BEFORE: dict[str, Case] = {
    "BatchNorm1d between": (
        lambda: MLP(nn.BatchNorm1d(HIDDEN)),
        PAIR,
        "Leave 'fc1', 'fc2' out of plan=, or write 'MLP' so that each hidden feature is computed by"
        " itself: 'between', a BatchNorm1d of 'MLP', cannot compute with a part of its features",
    ),
    "BatchNorm1d between frozen layers": (
        lambda: frozen(MLP(nn.BatchNorm1d(HIDDEN))),
        PAIR,
        "Leave 'fc1', 'fc2' out of plan=",
    ),
    "BatchNorm1d in a module of its own": (
        lambda: Net(nn.BatchNorm1d(HIDDEN)),
        {"net.0": "colwise", "net.2": "rowwise"},
        "Leave 'net.0', 'net.2' out of plan=, or write 'net' so",
    ),
    "LayerNorm between": (lambda: MLP(nn.LayerNorm(HIDDEN)), PAIR, "Leave 'fc1', 'fc2' out of"),
    "LayerNorm, said to be local": (
        lambda: MLP(nn.LayerNorm(HIDDEN)),
        {**PAIR, "between": "local"},
        "Leave 'fc1', 'fc2' out of plan=",
    ),
    "softmax between": (lambda: MLP(nn.Softmax(-1)), PAIR, "Leave 'fc1', 'fc2' out of plan="),
    "rowwise alone": (MLP, {"fc2": "rowwise"}, "Name the layer that gives 'fc2' its features"),
    "rowwise behind what is whole": (MLP, {**PAIR, "out": "rowwise"}, "Leave 'fc1', 'fc2' out of"),
    "colwise alone": (MLP, {"fc1": "colwise"}, "Name the layer that takes what it gives 'rowwise'"),
    "colwise into the loss": (MLP, {**PAIR, "out": "colwise"}, "Leave 'fc1', 'fc2', 'out' out of"),
    "colwise twice": (
        MLP,
        {"fc1": "colwise", "fc2": "colwise", "out": "rowwise"},
        "Leave 'fc1', 'out', 'fc2' out of plan=",
    ),
    "swapped": (MLP, {"fc1": "rowwise", "fc2": "colwise"}, "Leave 'fc2', 'fc1' out of plan="),
    "a norm between pairs": (
        MLP,
        {"fc2": "colwise", "out": "rowwise"},
        "Leave 'fc2', 'out' out of",
    ),
    "Conv2d": (CNN, {"conv": "colwise"}, "Leave 'conv' out of plan=: the style 'colwise' needs a"),
    "BatchNorm2d": (CNN, {"norm": "colwise"}, "Leave 'norm' out of plan=: the style 'colwise'"),
    "Embedding": (Tied, {"table": "colwise"}, "Use 'vocab' for 'table' in plan="),
    "Linear": (Tied, {"head": "vocab"}, "Use 'colwise', 'rowwise' or 'colwise_gather' for 'head'"),
    "what holds layers": (lambda: Net(nn.ReLU()), {"net": "rowwise"}, "Name the layers inside of"),
    "no module": (
        MLP,
        {"fc3": "colwise"},
        "Write the name of a module for 'fc3' in plan=: it fits",
    ),
    "no style": (MLP, {"fc1": "columns"}, "Use one of colwise, colwise_gather, rowwise"),
    "an object": (MLP, {"fc1": object()}, "Write the name of a style in plan=, one of colwise"),
    "no dictionary": (MLP, ["fc1"], "Pass plan='auto' or plan={"),
    "sizes": (
        lambda: MLP(hidden=9),
        PAIR,
        "Leave 'fc1' out of plan=, or use another tp_size: the 9",
    ),
    "rows": (lambda: Tied(9), {"table": "vocab", "head": "colwise_gather"}, "Leave 'table' out of"),
    "a tied head": (Tied, {"head": "colwise_gather"}, "Name 'table' in plan=, too, as 'vocab' say"),
    "a tied table": (Tied, {"table": "vocab"}, "Name 'head' in plan=, too, as 'colwise_gather'"),
    "a part of a sequence": (MLP, {"norm": "sequence"}, "Pass sequence_parallel=True, or use"),
}

IN_THE_FIRST_STEP: dict[str, Case] = {
    "what takes images": (
        CNN,
        PAIR,
        "Leave 'fc1', 'fc2' out of plan=, or write 'CNN' so that each hidden feature is computed by"
        " itself: 'between', a BatchNorm1d of 'CNN', cannot compute with a part of its features",
    ),
    "an argument that mixes": (
        Optional,
        "auto",
        "Leave 'net.fc1', 'net.fc2' out of plan=, or write 'net' so that each hidden feature is",
    ),
    "a learned slope": (lambda: MLP(nn.PReLU()), PAIR, "Name 'between' 'local' in plan=, or leave"),
}

CAN: dict[str, Case] = {
    "a pair": (MLP, PAIR, ""),
    "a frozen pair": (lambda: frozen(MLP()), PAIR, ""),
    "a head": (MLP, {"out": "colwise_gather"}, ""),
    "a learned slope, said to be local": (
        lambda: MLP(nn.PReLU()),
        {**PAIR, "between": "local"},
        "",
    ),
    "tied": (Tied, {"table": "vocab", "head": "colwise_gather"}, ""),
}


def outcomes() -> dict[str, tuple[str, int]]:
    """Trains each for a step; gives the error, if there is one, and how many steps have begun."""
    warnings.simplefilter("ignore")
    return {name: _outcome(*case[:2]) for name, case in (BEFORE | IN_THE_FIRST_STEP | CAN).items()}


def _outcome(make: Callable[[], L.LightningModule], plan: Any) -> tuple[str, int]:
    torch.manual_seed(0)
    module = make()
    data = TensorDataset(torch.randn(4, 1, 2, WIDTH // 2), torch.randint(ROWS, (4,)))
    if isinstance(module, CNN):
        data = TensorDataset(torch.randn(4, 1, 2, 4), torch.randint(ROWS, (4,)))
    try:
        trainer = make_trainer(devices=2, max_steps=1, strategy=TensorParallelStrategy(plan=plan))
        trainer.fit(module, DataLoader(data, batch_size=4))
    except (ValueError, RuntimeError) as error:
        return str(error), module.num_steps
    return "", module.num_steps


def test_each_plan_that_does_not_fit_says_what_to_write(workers: WorkerPool) -> None:
    first, second = workers.run(2, outcomes, timeout=120)
    assert first == second
    for name, (_, _, words) in BEFORE.items():
        assert first[name][1] == 0, name
        assert first[name][0].startswith(words), name
    for name, (_, _, words) in IN_THE_FIRST_STEP.items():
        assert first[name][1] == 1, name
        assert first[name][0].startswith(words), name
    assert [first[name] for name in CAN] == [("", 1)] * len(CAN)

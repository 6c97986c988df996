"""Between a forward and its backward a module has its shards, with their gradients."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import FSDPStrategy, MeshStrategy
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool


class Clearing(L.LightningModule):
    """Clears gradients by the module, after each second batch, and sums them up before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(12, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.middle[0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x.flatten(1)))) * self.scale
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen += float(sum(gradient.square().sum() for gradient in gradients))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.first.zero_grad()
        if batch_idx % 2:
            self.zero_grad(set_to_none=epoch == 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InHand(Clearing):
    """Clears each part's gradients between its forward and its backward."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.middle(self.first(x.flatten(1)))
        return made

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        making, judging = self.optimizers()
        made = self(batch[0])
        loss = F.cross_entropy(self.last(made.detach()), batch[1])
        self.last.zero_grad()
        self.manual_backward(loss)
        judging.step()
        loss = F.cross_entropy(self.last(made), batch[1].flip(0))
        self.first.zero_grad()
        self.middle.zero_grad()
        self.manual_backward(loss)
        making.step()

    def configure_optimizers(self) -> Any:
        making = [*self.first.parameters(), *self.middle.parameters()]
        return torch.optim.SGD(making, lr=0.1), torch.optim.SGD(self.last.parameters(), lr=0.1)


STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "shards": FSDPStrategy,
    "gradients": lambda: FSDPStrategy(shard="gradients"),
    "sharded over two": lambda: FSDPStrategy(reshard_after_forward=2),
    "stages": lambda: MeshStrategy(pp=2, dp_shard=2),
}


def fit(devices: int, name: str, kind: type[L.LightningModule]) -> dict[str, Tensor]:
    trainer = make_trainer(devices=devices, strategy=STRATEGIES[name](), max_epochs=2)
    module = make_module(kind)
    trainer.fit(module, make_loader(24))
    return {**state_of(module), "seen": module.seen.clone()}


def check(expected: dict[str, Tensor], ranks: list[dict[str, Tensor]]) -> None:
    for found in ranks:  # all have read the same batches
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("shards", 2, Clearing),
        ("gradients", 2, Clearing),
        ("sharded over two", 4, Clearing),
        ("shards", 2, InHand),
    ],
)
def test_equals_a_single_device(
    workers: WorkerPool, name: str, devices: int, kind: type[L.LightningModule]
) -> None:
    (expected,) = workers.run(1, fit, 1, "one", kind)
    ranks = workers.run(devices, fit, devices, name, kind)
    assert ranks[0].keys() == expected.keys()
    check(expected, ranks)


def test_sharded_stages_clear_theirs(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, fit, 1, "one", Clearing)
    ranks = workers.run(4, fit, 4, "stages", Clearing)
    seen = [rank.pop("seen") for rank in ranks]  # of a rank's own stage
    torch.testing.assert_close(seen[0] + seen[3], expected.pop("seen"), rtol=1e-10, atol=1e-12)
    check(expected, ranks)
    assert {*ranks[0], *ranks[3]} == {*expected}

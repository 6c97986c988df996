"""A stage holds one set of gradients, unless the user looks at the old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.optim import Optimizer

from lightning_dist import MeshStrategy, PipelineStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class Watched(Classifier):
    """Notes, in each forward of a layer, whether the stage has gradients of an update before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.own: list[nn.Parameter] = []
        for layer in self.model.children():
            layer.register_forward_pre_hook(self._look)

    def on_train_start(self) -> None:
        groups = self.trainer.optimizers[0].param_groups  # in a forward, layers have versions
        self.own = [parameter for group in groups for parameter in group["params"]]

    def _look(self, _: nn.Module, __: Any) -> None:
        if self.training:
            self.seen.append(any(p.grad is not None for p in self.own))


class Looking(Watched):
    """Sums up the gradients of the update before."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.sums.append(sum(float(gradient.square().sum()) for gradient in gradients))


class Keeping(torch.optim.SGD):
    """Does not drop gradients, but fills them with zeros."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class WithKeeping(Watched):
    def configure_optimizers(self) -> Any:
        return Keeping(self.parameters(), lr=0.1)


def watch(devices: int, kind: type[Watched], schedule: str, options: dict[str, Any]) -> Any:
    strategy: Any = "auto"
    if devices > 1:
        mesh = schedule == "mesh"
        strategy = MeshStrategy(pp=2) if mesh else PipelineStrategy(schedule=schedule)
    module = make_module(kind)
    calls: list[int] = []
    if options.pop("looks", False):
        looking = LambdaCallback(on_before_zero_grad=lambda *_: calls.append(1))
        options["callbacks"] = [looking]
    trainer = make_trainer(devices=devices, strategy=strategy, **options)
    trainer.fit(module, make_loader(24), make_loader(4))
    return module.seen, getattr(module, "sums", [])


@pytest.mark.some("1f1b", "pipedream_2bw", "mesh")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "pipedream", "pipedream_2bw", "mesh"])
def test_old_gradients_are_gone_when_new_ones_come(workers: WorkerPool, schedule: str) -> None:
    for seen, _ in workers.run(2, watch, 2, Watched, schedule, {}):
        assert len(seen) >= 6
        assert not any(seen)


def test_gradients_that_accumulate_stay(workers: WorkerPool) -> None:
    options = {"accumulate_grad_batches": 2}
    for seen, _ in workers.run(2, watch, 2, Watched, "gpipe", options):
        each = len(seen) // 3
        by_batch = [any(seen[each * batch : each * (batch + 1)]) for batch in range(3)]
        assert by_batch == [False, True, False]  # the second one meets the first one's


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Looking, {}), (WithKeeping, {}), (Watched, {"looks": True})],
    ids=["hook", "optimizer", "callback"],
)
def test_who_looks_at_old_gradients_has_them(
    workers: WorkerPool, kind: type[Watched], options: dict[str, Any]
) -> None:
    _, expected = watch(1, kind, "1f1b", dict(options))
    found = workers.run(2, watch, 2, kind, "1f1b", options)
    assert all(any(seen) for seen, _ in found)
    over_stages = [sum(own) for own in zip(*(sums for _, sums in found), strict=True)]
    assert over_stages == pytest.approx(expected, abs=1e-12)

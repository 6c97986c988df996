"""Hooks and callbacks call a sharded module, or a part of it, as on one device."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_dist import FSDPStrategy
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import CaseFailedError, WorkerPool

HOOKS = (
    "on_fit_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_fit_end",
)


class Encoder(nn.Module):
    """Has parameters of its own around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks(F.relu(self.first(x.flatten(1)))))
        return result


class Encoding(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean = Encoder(), MeanMetric()
        self.seen: list[tuple[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.encoder(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.encoder(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfUnits(Encoding):
    """Has no parameters outside of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
        self.encoder = nn.Sequential(*layers)  # type: ignore[assignment]

    def on_fit_start(self) -> None:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 2, 6)
        self.seen.append(("on_fit_start", self.encoder(x).detach().clone()))


class Calling(L.Callback):
    """Calls the module and its encoder in a hook; calls a metric on one rank only."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        setattr(self, hook, self._call)

    def _call(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 2, 6)
        before = torch.is_grad_enabled()
        found = module(x), module.encoder(x * 2)
        assert torch.is_grad_enabled() == before
        module.seen += [(self.hook, value.detach().clone()) for value in found]
        if trainer.is_global_zero:
            module.mean(1.0)


def fit(
    devices: int, hook: str, reshard_after_forward: bool | str = "auto"
) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
    strategy: Any = "auto"
    if devices > 1:
        strategy = FSDPStrategy(reshard_after_forward=reshard_after_forward)
    callback = Calling(hook)
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=[callback], max_epochs=2)
    module = make_module(Encoding)
    trainer.fit(module, make_loader(24), make_loader(8))
    return state_of(module), module.seen


@pytest.mark.some("on_before_backward", "on_validation_epoch_end")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_call_the_model(workers: WorkerPool, hook: str) -> None:
    compare(workers, hook)


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_train_batch_end"])
def test_hooks_call_a_model_whose_root_is_freed_behind_its_forward(
    workers: WorkerPool, hook: str
) -> None:
    compare(workers, hook, True)


def compare(workers: WorkerPool, hook: str, *options: Any) -> None:
    ((expected, seen),) = workers.run(1, fit, 1, hook)
    assert seen
    for state, own in workers.run(2, fit, 2, hook, *options):  # both read the same batches
        for (name, value), (other, tensor) in zip(own, seen, strict=True):
            assert name == other
            torch.testing.assert_close(value, tensor, rtol=1e-10, atol=1e-12)
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12)


def fit_units(devices: int) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
    strategy: Any = FSDPStrategy(ByClass(["Linear"])) if devices > 1 else "auto"
    module = make_module(OfUnits)
    make_trainer(devices=devices, strategy=strategy).fit(module, make_loader(24), make_loader(8))
    return state_of(module), module.seen


def test_a_hook_calls_a_model_of_units_before_the_first_step(workers: WorkerPool) -> None:
    ((expected, ((_, seen),)),) = workers.run(1, fit_units, 1)
    for state, ((_, own),) in workers.run(2, fit_units, 2):
        torch.testing.assert_close(own, seen, rtol=1e-10, atol=1e-12)
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12)


class Recomputing(Encoding):
    """Its step checkpoints parts that it calls itself, whose calls the backward repeats."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.middle = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.head = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.encoder(batch[0])
        for part in (lambda x: x + self.middle(x), self.head):
            h = checkpoint(part, h, use_reentrant=self.use_reentrant)
        return F.cross_entropy(h + self.middle(h), batch[1])


def fit_recomputing(devices: int, use_reentrant: bool, manual: bool) -> dict[str, Tensor]:
    strategy: Any = FSDPStrategy() if devices > 1 else "auto"
    kind = InHand if manual else Recomputing
    module = make_module(kind, use_reentrant=use_reentrant)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_loader(24), make_loader(8))
    return state_of(module)


class InHand(Recomputing):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_gradients_that_a_reentrant_checkpoint_loses_are_named(workers: WorkerPool) -> None:
    with pytest.raises(CaseFailedError) as error:
        workers.run(2, fit_recomputing, 2, True, True)
    message = r"ValueError: Gradients of middle\.0\.weight, middle\.0\.bias would be lost"
    assert len(re.findall(message, str(error.value))) == 2


@pytest.mark.some("True-False")
@pytest.mark.parametrize(
    ("use_reentrant", "manual"), [(False, False), (True, False), (False, True)]
)
def test_a_step_recomputes_parts_that_it_calls_itself(
    workers: WorkerPool, use_reentrant: bool, manual: bool
) -> None:
    (expected,) = workers.run(1, fit_recomputing, 1, use_reentrant, manual)
    for state in workers.run(2, fit_recomputing, 2, use_reentrant, manual):
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12)

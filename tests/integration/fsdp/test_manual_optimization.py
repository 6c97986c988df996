"""Steps that call backward and update by themselves do on shards what they do on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import FSDPStrategy, MeshStrategy
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import ConvLayer, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined, loaders_of
from tests.integration.conformance.strategies import ENTRIES


class Gan(L.LightningModule):
    """Two models that train each other, in one of the ways that users write."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way
        self.generator = nn.Sequential(ConvLayer(), ConvLayer())
        self.discriminator = nn.Sequential(ConvLayer(), nn.Flatten(), nn.Linear(12, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        getattr(self, self.way)(x, x.roll(1, -1), batch_idx)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def loss_of_discriminator(self, x: Tensor, z: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(z).detach())
        loss = F.softplus(-self.discriminator(x)).mean() + F.softplus(fake).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def loss_of_generator(self, z: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(z))).mean()

    def toggled(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        for optimizer in (discriminator, generator):
            self.toggle_optimizer(optimizer)
            is_first = optimizer is discriminator
            loss = self.loss_of_discriminator(x, z) if is_first else self.loss_of_generator(z)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def scored(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        """Calls the discriminator without a backward, ahead of its own turn and within another."""
        generator, discriminator = self.optimizers()
        if batch_idx > 0:  # in the first batch it is called in another's turn before its own
            with torch.no_grad():
                self.log("before", self.discriminator(x).mean(), sync_dist=True)
        for optimizer in (generator, discriminator):
            self.toggle_optimizer(optimizer)
            is_first = optimizer is generator
            loss = self.loss_of_generator(z) if is_first else self.loss_of_discriminator(x, z)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                self.log("after", self.discriminator(self.generator(z)).mean(), sync_dist=True)
            self.untoggle_optimizer(optimizer)

    def frozen(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        """Freezes a layer for one of two calls, by its name."""
        generator, discriminator = self.optimizers()
        loss = F.softplus(-self.discriminator(x)).mean()
        self.discriminator[2].requires_grad_(False)
        loss = loss + F.softplus(self.discriminator(self.generator(z).detach())).mean()
        self.discriminator[2].requires_grad_(True)
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()
        generator.step()  # a scheduler asks for it

    def accumulated(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        """Over two batches; what the last one leaves, validation drops."""
        is_last = batch_idx % 2 == 1
        generator, discriminator = self.optimizers()
        with generator.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss_of_generator(z))
        with discriminator.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss_of_discriminator(x, z))
        for optimizer in (generator, discriminator) if is_last else ():
            optimizer.step()
            optimizer.zero_grad()

    def twice(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        """The second backward reaches no parameter of the generator."""
        self.manual_backward(self.loss_of_generator(z))
        self.manual_backward(self.loss_of_discriminator(x, z))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def one_is_left(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        """Updates without gradients, which AdamW's decay leaves alone."""
        generator, discriminator = self.optimizers()
        self.manual_backward(self.loss_of_discriminator(x, z))
        generator.step()
        discriminator.step()
        discriminator.zero_grad()

    def closures(self, x: Tensor, z: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()

        def closure() -> Tensor:
            generator.zero_grad()
            loss = self.loss_of_generator(z)
            self.manual_backward(loss)
            return loss

        generator.step(closure=closure)
        discriminator.zero_grad()
        self.manual_backward(self.loss_of_discriminator(x, z))
        total = nn.utils.clip_grad_norm_(self.discriminator.parameters(), 0.05)
        assert total > 0
        discriminator.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of_generator(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.AdamW(self.generator.parameters(), lr=0.01, weight_decay=0.1)
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9)
        both = [generator, discriminator]
        return both, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in both]


WAYS = ("toggled", "scored", "frozen", "accumulated", "twice", "one_is_left", "closures")
STRATEGIES: dict[str, Any] = {
    "blocks": FSDPStrategy,
    "kept": lambda: FSDPStrategy(reshard_after_forward=False),
    "whole": lambda: FSDPStrategy(ByClass(["Sequential"]), reshard_after_forward=False),
    "replicas": lambda: MeshStrategy(dp_replicate=2, dp_shard=1),
    "recomputed": lambda: FSDPStrategy(activation_checkpointing="full"),
}


def fit(name: str | None, way: str) -> dict[str, Tensor]:
    module = make_module(Gan, way=way)
    entry = ENTRIES["fsdp-2"] if name else None
    trainer = make_trainer(
        devices=2 if name else 1, strategy=STRATEGIES[name]() if name else "auto", max_epochs=2
    )
    trainer.fit(module, *loaders_of(trainer, entry))
    assert trainer.global_step > 0
    values = {key: torch.as_tensor(v).double() for key, v in trainer.callback_metrics.items()}
    return {**state_of(module), "val_loss": values["val_loss"]}


@cache
def of_one_device(way: str) -> dict[str, Tensor]:
    return fit(None, way)


@pytest.mark.some("closures")
@pytest.mark.parametrize("way", WAYS)
def test_equals_one_device(workers: WorkerPool, way: str) -> None:
    assert_close(joined(workers.run(2, fit, "blocks", way)), of_one_device(way))


@pytest.mark.some("recomputed", "whole")
@pytest.mark.parametrize("name", ["kept", "whole", "replicas", "recomputed"])
def test_equals_it_however_parameters_are_sharded(workers: WorkerPool, name: str) -> None:
    # A recomputation would find the layer thawed, on one device, too.
    frozen = () if name == "recomputed" else ("frozen",)
    for way in ("toggled", "scored", *frozen, "twice"):
        assert_close(joined(workers.run(2, fit, name, way)), of_one_device(way))


class WithOwn(Gan):
    """Has a parameter that no module of it has."""

    def __init__(self) -> None:
        super().__init__("twice")
        self.scale = nn.Parameter(torch.ones(1))


def attempt(module: L.LightningModule) -> str:
    trainer = make_trainer(devices=2, strategy=FSDPStrategy())
    try:
        trainer.fit(module, *loaders_of(trainer, ENTRIES["fsdp-2"]))
    except ValueError as error:
        return str(error)
    return ""


def attempt_with_own() -> str:
    return attempt(make_module(WithOwn))


def attempt_later() -> str:
    module = make_module(Synced)
    assert attempt(module) == ""
    module.automatic_optimization = False
    return attempt(module)


def test_a_change_of_mind_is_refused(workers: WorkerPool) -> None:
    for text in workers.run(2, attempt_later):
        assert text.startswith("The module was sharded for automatic optimization"), text


def test_a_parameter_outside_of_all_calls_is_refused(workers: WorkerPool) -> None:
    for text in workers.run(2, attempt_with_own):
        assert text.startswith("With manual optimization"), text
        assert " scale belong to no module" in text

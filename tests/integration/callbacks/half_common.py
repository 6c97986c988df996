"""What the tests of half precision share: a module, runs under Lightning, comparisons."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader

from lightning_dist.callbacks import MixedPrecision
from tests.helpers.half_reference import (
    Batch,
    ByPieces,
    Reference,
    half_weights,
    make_half,
    one_thread,
)
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)

NUM_SAMPLES = 48

History = list[tuple[float, float]]
"""The loss scale and the number of steps left out, behind each batch."""


class Halved(Classifier):
    """Takes its loss in fp32, and writes down what is logged."""

    history: History

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        assert logits.dtype == torch.float32
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        names = ("mixed_precision/loss_scale", "mixed_precision/skipped_steps")
        self.history.append(tuple(float(metrics.get(name, 0.0)) for name in names))


@dataclass
class Run:
    """A rank's end."""

    state: dict[str, Tensor]
    history: History
    metrics: dict[str, float]


@dataclass
class Asked:
    """A run to make on some devices."""

    precision: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    shares: int = 1
    optimizer: str = "sgd"
    save: str | None = None
    resume: str | None = None


def fit(strategy: Any, devices: int, asked: Asked, class_: type[Halved] = Halved) -> Run:
    module = make_module(class_, optimizer=asked.optimizer).float()
    module.history = []
    ((module.example_input_array, _),) = make_loader(8)
    callback = MixedPrecision(**asked.precision)
    trainer = make_trainer(
        devices=devices, strategy=strategy, callbacks=[callback], **asked.trainer
    )
    if asked.save is not None:
        module.on_train_epoch_end = lambda: trainer.save_checkpoint(asked.save)
    rank = int(os.environ.get("RANK", "0"))
    loader = loaders(asked.shares)[rank % asked.shares]
    trainer.fit(module, loader, make_loader(8), ckpt_path=asked.resume, weights_only=True)
    scale = callback.loss_scale
    if scale is not None:
        module.history.append((scale.value, float(scale.num_skipped)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Run(state_of(module), module.history, metrics)


def loaders(shares: int) -> list[DataLoader[Any]]:
    if shares == 1:
        return [make_loader(NUM_SAMPLES)]
    return [share_of(rank, NUM_SAMPLES) for rank in range(shares)]


def batches_of(shares: int, epochs: int = 1) -> list[list[Batch]]:
    """What the data ranks get, batch by batch."""
    return epochs * [list(batch) for batch in zip(*loaders(shares), strict=True)]


def expected(
    *,
    shares: int = 1,
    epochs: int = 1,
    optimizer: str = "sgd",
    num_shards: int = 1,
    device: str = "cpu",
    **options: Any,
) -> Run:
    """What a plain loop gives on a device."""
    module = make_module(Halved).float().to(device)
    if not options.get("master_weights", True):
        make_half(module.model, torch.bfloat16)
    history = []
    with one_thread():
        updates = ByPieces(partial(make_optimizer, optimizer), module.model, num_shards)
        loop = Reference(module.model, updates, **options)
        for batches in batches_of(shares, epochs):
            loop.step([[part.to(device) for part in batch] for batch in batches])
            history.append((loop.scale.value, float(loop.scale.num_skipped)))
        ((x, y),) = make_loader(8)
        x, y = x.to(device), y.to(device)
        weights = half_weights(module.model, loop.dtype)
        logits = functional_call(module.model, weights, x.to(loop.dtype)).float()
        val_loss = float(F.cross_entropy(logits, y).detach())
    return Run(state_of(module), [*history, *history[-1:]], {"val_loss": val_loss})


def assert_follows(ranks: list[Run], found: Run) -> None:
    """Checks that nothing differs, but for the order in which a validation's losses are summed."""
    assert_equal(joined(ranks), found.state)
    for rank in ranks:
        assert abs(rank.metrics["val_loss"] - found.metrics["val_loss"]) < 1e-6


def joined(runs: list[Run]) -> dict[str, Tensor]:
    return {name: value for run in runs for name, value in run.state.items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), (name, (actual[name] - value).abs().max())


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)

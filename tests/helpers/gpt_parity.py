"""The recipe's GPT under a strategy, and on a single device: the same to the last digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist.engine.tensors.dtensor import whole
from recipes.gpt import GPT
from tests.helpers.networks.models import make_trainer

DEPTH = 2
BATCH_SIZE = 4
NUM_SAMPLES = 40  # ten batches
TOLERANCE = 1e-10


class Measured(GPT):
    """Looks at its logits beside the loss, as users do."""

    def __init__(self, ways: dict[str, bool] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.ways = ways or {}
        self.accuracy = MulticlassAccuracy(256, average="micro")
        self.seen = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits.transpose(1, 2), y), sync_dist=True)
        self.accuracy(logits.flatten(0, 1), y.flatten())
        self.seen(y.numel())
        self.log("val_accuracy", self.accuracy)
        self.log("val_seen", self.seen)
        self.log("val_mean_logit", logits.mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.ways)


def data(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    drawn = torch.randint(256, (2, num_samples, 8), generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn[0], drawn[1])


def make_gpt(dropout: float = 0.0, ways: dict[str, bool] | None = None) -> Measured:
    torch.manual_seed(0)
    return Measured(width=32, depth=DEPTH, num_heads=4, dropout=dropout, ways=ways).double()


@dataclass
class Fitted:
    """What came of a training.

    Attributes:
        state: Parameters, those of this rank, made whole.
        gradients: Of all updates, in dim 0, before clipping.
        metrics: At the end.
        predicted: For the data of this rank.
        replica: Which share of the data that is.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    predicted: Tensor = field(default_factory=lambda: torch.empty(0))
    replica: int = 0


def fit(
    devices: int,
    strategy: Strategy | str,
    num_samples: int = NUM_SAMPLES,
    ways: dict[str, bool] | None = None,
    **options: Any,
) -> Fitted:
    """Trains for an epoch; all replicas together have the batches of a single device.

    The last batch and what is left over serve for validation and prediction.
    """
    module, fitted = make_gpt(ways=ways), Fitted()
    trainer = make_trainer(devices=devices, strategy=strategy, gradient_clip_val=0.5, **options)
    share: dict[str, Any] = {"num_replicas": 1, "rank": 0}
    if devices > 1:
        share = trainer.strategy.distributed_sampler_kwargs
    samples = data(num_samples)

    def loader(samples: Any) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(samples, shuffle=False, **share)
        return DataLoader(samples, BATCH_SIZE // share["num_replicas"], sampler=sampler)

    last = range(num_samples - BATCH_SIZE - num_samples % BATCH_SIZE, num_samples)
    to_evaluate = loader(Subset(samples, last))

    kept: dict[str, list[Tensor]] = {}

    def keep_gradients(*_: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:  # clipped in place afterwards
                kept.setdefault(name, []).append(parameter.grad.clone())

    module.on_before_optimizer_step = keep_gradients
    trainer.fit(module, loader(samples), to_evaluate)
    fitted.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, to_evaluate)
    assert predicted is not None
    fitted.predicted = torch.cat(list(predicted))
    fitted.gradients = {name: torch.stack(list(map(whole, of))) for name, of in kept.items()}
    fitted.state = {name: whole(p.detach()).clone() for name, p in module.named_parameters()}
    fitted.replica = share["rank"]
    return fitted


def check_equal(ranks: list[Fitted], single: Fitted, replicas: int, num_updates: int) -> None:
    """Compares what all ranks have with what a single device has."""
    assert {name for found in ranks for name in found.state} == single.state.keys()
    for found in ranks:
        assert found.metrics.keys() == single.metrics.keys()
        for name, metric in single.metrics.items():  # the training loss is each replica's own
            if replicas == 1 or name != "train_loss":
                assert found.metrics[name] == pytest.approx(metric, abs=TOLERANCE), name
        assert _apart(found.predicted, single.predicted[found.replica :: replicas]) < TOLERANCE
        for name, value in found.state.items():
            assert _apart(value, single.state[name]) < TOLERANCE, name
        assert found.gradients.keys() == found.state.keys()
        for name, gradients in found.gradients.items():
            assert len(gradients) == num_updates
            assert _apart(gradients, single.gradients[name]) < TOLERANCE, name


def _apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())

"""What the tests of moving layers share: a model of many kinds, runs, and a comparison."""

from __future__ import annotations

import random
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.strategies.base.saving.part_warning import without_warning
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_data,
    make_module,
    make_optimizer,
    make_trainer,
)

STEPS = 4
"""Batches of an epoch."""
BY_PARAMETERS = (2, 4)
"""The cut of :class:`Mixed` that balances the parameters of two stages."""


class NormLayer(nn.Module):
    """Has buffers that each batch changes, dropout, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x)) * self.scale


class SlowLayer(ConvLayer):
    """Small, and takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Mixed(Classifier):
    """Six layers; two groups of parameters, whose rates differ and fall."""

    def __init__(self, first: type[ConvLayer] = ConvLayer, **options: Any) -> None:
        super().__init__(schedule_lr=True, **options)
        parts = [first(0.1), NormLayer(), ConvLayer(0.1), NormLayer()]
        self.model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(12, 3))
        self.seen = MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(loss.detach())
        self.losses.append(float(loss.detach()) + random.random())
        return loss

    def configure_optimizers(self) -> Any:
        norms = [p for n, p in self.named_parameters() if "norm" in n]
        others = [p for n, p in self.named_parameters() if "norm" not in n]
        groups = [{"params": norms, "lr": 0.002}, {"params": others}]
        optimizer = make_optimizer(self.optimizer, groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    strategy: dict[str, Any],
    cut: Any,
    epochs: int,
    module: dict[str, Any],
    callback: L.Callback | None = None,
    resume: str | None = None,
    save: str | None = None,
    trainer: dict[str, Any] | None = None,
    half: dict[str, Any] | None = None,
) -> dict[str, Any]:
    random.seed(5)
    made = make_module(Mixed, **module)
    callbacks = [] if callback is None else [callback]
    if half is not None:
        made = made.float()
        callbacks.append(MixedPrecision(**half))
    cutting = PipelineStrategy(partition=cut, **strategy)
    fitting = make_trainer(
        strategy=cutting,
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=callbacks,
        **(trainer or {}),
    )
    data = make_data(8 * STEPS * cutting.mesh.data_size)
    sampler = DistributedSampler(data, shuffle=False, **cutting.distributed_sampler_kwargs)
    loader = DataLoader(data, 8, sampler=sampler)
    fitting.fit(made, loader, loader, ckpt_path=resume, weights_only=True)
    if save is not None:
        fitting.save_checkpoint(save)
    state = cutting.optimizer_state(cutting.optimizers[0])
    with without_warning(made):
        weights = made.state_dict()
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "optimizer": {
            f"{name}.{key}": torch.as_tensor(value).clone()
            for name, entries in state["state"].items()
            for key, value in entries.items()
        },
        "groups": state["param_groups"],
        "loss": float(fitting.callback_metrics["train_loss_epoch"]),
        "scale": float(fitting.callback_metrics.get("mixed_precision/loss_scale", 0.0)),
        "cut": cutting._split.layers_per_stage,
        "updates": [len(stage) for stage in cutting.staleness],
        "metric": (float(made.seen.mean_value), float(made.seen.weight)),
        "losses": made.losses,
        "draws": (torch.rand(1).item(), random.random()),
        "spans": sum(span.kind is SpanKind.UPDATE for span in cutting.timeline.spans),
    }


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["cut"] == right["cut"]
    assert left["groups"] == right["groups"]
    assert left["loss"] == right["loss"]
    assert left["scale"] == right["scale"]
    for kind in ("weights", "optimizer"):
        assert left[kind].keys() == right[kind].keys()
        for key, value in left[kind].items():
            assert torch.equal(value, right[kind][key]), key


class ToAndFro(L.Callback):
    """Gives the last stage nearly all layers after the first batch, and the first one after two."""

    def __init__(self, ends: tuple[int, int] = (0, 1)) -> None:
        self.ends = ends

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rest = sum(trainer.strategy.session.pipeline.shape.layers_per_stage) - 1
        if batch_idx < 2:
            trainer.strategy.repartition([[1, rest], [rest, 1]][self.ends[batch_idx]])

"""What the tests of asynchronous schedules share: runs under Lightning, and a comparison."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)

EPOCHS = 3
LR_DECAY = 0.9
SIZES = [8, 8, 8, 8, 8, 6]
"""Of an epoch's batches."""

Fitted = tuple[dict[str, Tensor], float]
"""A rank's parameters, and the loss of the last epoch."""


def trainer_of(devices: int, strategy: PipelineStrategy, options: dict[str, Any]) -> L.Trainer:
    """Makes a trainer that drains between epochs, for it validates there."""
    drains = {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    return make_trainer(
        devices=devices, strategy=strategy, max_epochs=EPOCHS, **{**drains, **options}
    )


def fit(
    num_stages: int,
    strategy: dict[str, Any],
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    class_: type[Classifier] = Classifier,
) -> Fitted:
    """Trains stages of the same number of layers, with other arguments for each part."""
    made = make_module(class_, **(module or {}))
    cut = PipelineStrategy(partition="uniform", **strategy)
    fitting = trainer_of(num_stages, cut, trainer or {})
    fitting.fit(made, make_loader(), make_loader())
    return state_of(made), float(fitting.callback_metrics["train_loss_epoch"])


def fit_counting(num_stages: int, strategy: dict[str, Any]) -> Fitted:
    """Trains with an optimizer that counts in its groups; gives the count in the loss's place."""
    module = make_module(optimizer="schedule_free", schedule_lr=True)
    cut = PipelineStrategy(partition="uniform", **strategy)
    fitting = trainer_of(num_stages, cut, {})
    fitting.fit(module, make_loader(), make_loader())
    return state_of(module), float(fitting.optimizers[0].param_groups[0]["k"])


def fit_replicas(strategy: dict[str, Any], trainer: dict[str, Any]) -> Fitted:
    """Trains two replicas of two stages."""
    module = make_module()
    cut = PipelineStrategy(num_stages=2, partition="uniform", **strategy)
    fitting = trainer_of(4, cut, trainer)
    data = make_data(48)
    sampler = DistributedSampler(data, shuffle=False, **cut.distributed_sampler_kwargs)
    fitting.fit(module, DataLoader(data, batch_size=4, sampler=sampler), make_loader(8))
    return state_of(module), float(fitting.callback_metrics["train_loss_epoch"])


def mean_of(losses: list[float]) -> float:
    """Weighs an epoch's losses by their batches' samples."""
    return sum(size * loss for size, loss in zip(SIZES, losses, strict=True)) / sum(SIZES)


def largest_difference(actual: list[Fitted], expected: dict[str, Tensor]) -> float:
    """Compares what all ranks have with the whole model."""
    states: dict[str, Tensor] = {}
    for state, _ in actual:
        states.update(state)
    assert states.keys() == expected.keys()
    return max(float((states[n] - expected[n]).abs().max()) for n in expected)


def assert_replicas_agree(actual: list[Fitted]) -> None:
    """Checks that the first stage's two ranks hold the same, and the second's."""
    for first, second in ((0, 1), (2, 3)):
        left, right = actual[first][0], actual[second][0]
        assert left.keys() == right.keys()
        assert all(bool((left[name] == right[name]).all()) for name in left)

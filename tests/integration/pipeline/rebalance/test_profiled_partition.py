"""A cut that is measured before the first step, and leaves no other trace."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.networks.traced_models import Task, make_images
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.rebalance.moving_common import (
    BY_PARAMETERS,
    Mixed,
    SlowLayer,
    assert_same,
    fit,
)


def profile_and_repeat(strategy: dict[str, Any], half: dict[str, Any] | None) -> Any:
    options: dict[str, Any] = {"trainer": {"devices": 2}, "half": half}
    module = {"first": SlowLayer}
    profiled = fit(strategy, "profile", 1, module, **options)
    by_hand = fit(strategy, list(profiled["cut"]), 1, module, **options)
    return profiled, by_hand


@pytest.mark.some("pipedream", "masters")
@pytest.mark.parametrize(
    ("strategy", "half"),
    [
        ({"schedule": "1f1b", "num_microbatches": 2}, None),
        ({"schedule": "pipedream"}, None),
        ({"schedule": "pipedream"}, {}),
    ],
    ids=["1f1b", "pipedream", "masters"],
)
def test_profiles_before_the_first_step_and_leaves_no_trace(
    workers: WorkerPool, strategy: dict[str, Any], half: dict[str, Any] | None
) -> None:
    for profiled, by_hand in workers.run(2, profile_and_repeat, strategy, half):
        assert profiled["cut"] == (1, 5) != BY_PARAMETERS
        assert_same(profiled, by_hand)
        for key in ("losses", "draws", "metric", "updates", "spans"):
            assert profiled[key] == by_hand[key], key


def evaluate_only(strategy: PipelineStrategy) -> tuple[int, ...]:
    trainer = make_trainer(devices=2, strategy=strategy)
    trainer.validate(make_module(Mixed), make_loader(8), verbose=False)
    return strategy._split.layers_per_stage


def evaluate_twice() -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        cuts = [evaluate_only(PipelineStrategy(partition=how)) for how in ("profile", "parameters")]
    finally:
        logger.removeHandler(handler)
    return cuts, [text for text in said if "partition='profile'" in text]


def test_what_does_not_train_is_cut_by_parameters_and_says_so(workers: WorkerPool) -> None:
    (cuts, said), (other_cuts, other_said) = workers.run(2, evaluate_twice)
    assert cuts == other_cuts == [BY_PARAMETERS, BY_PARAMETERS]
    assert len(said) == 1
    assert "cut by parameters" in said[0]
    assert other_said == []


class SmallAndSlow(nn.Module):
    """Has most of its parameters behind the two convolutions that take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 64, 3, padding=1)
        self.slow = nn.Conv2d(64, 64, 3, padding=1)
        self.slow_too = nn.Conv2d(64, 64, 3, padding=1)
        self.join = nn.Conv2d(64, 1, 1)
        self.wide = nn.Linear(64, 2048)
        self.head = nn.Linear(2048, 64)

    def forward(self, x: Tensor) -> Tensor:
        deep = torch.tanh(self.slow(torch.tanh(self.stem(x))))
        deep = self.join(torch.tanh(self.slow_too(deep)))
        return self.head(torch.tanh(self.wide(deep.flatten(1)))).view_as(x)


class Evaluated(Task):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def fit_and_test_the_best(folder: str) -> Any:
    module = make_module(partial(Evaluated, SmallAndSlow))
    strategy = PipelineStrategy(layers="trace", partition="profile", num_microbatches=4)
    cuts: list[tuple[int, ...]] = []
    note = LambdaCallback(on_fit_start=lambda *_: cuts.append(strategy._split.layers_per_stage))
    trainer = make_trainer(
        devices=2,
        strategy=strategy,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, monitor="val_loss"), note],
    )
    trainer.fit(module, make_images(16, 16), make_images(16, 16))
    validated = float(trainer.callback_metrics["val_loss"])
    (tested,) = trainer.test(module, make_images(16, 16), ckpt_path="best", verbose=False)
    return strategy._split.layers_per_stage, cuts[0], validated, tested["val_loss"]


def test_the_best_checkpoint_of_a_traced_model_whose_layers_moved_is_tested(
    workers: WorkerPool, tmp_path: Path
) -> None:
    for cut, built, validated, tested in workers.run(2, fit_and_test_the_best, str(tmp_path)):
        assert cut != built
        assert tested == validated

"""Lightning's tuners find what they find on one device, and leave nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    MeshStrategy,
    OuterOptimizer,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.helpers.networks.models import Classifier, make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 32
NUM_TRAINING = 7
LATE = ("pipedream", "pipedream_2bw")
STRATEGIES = ("ddp", "fsdp", "1f1b", *LATE)
OTHERS = ("diloco", "streaming", "topk", *LATE)  # losses are not those of one device


class Tuned(Classifier):
    """Has a rate and a batch size to be found; all replicas read the same."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        self.lr, self.batch_size = lr, batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(NUM_SAMPLES), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(make_data(8), batch_size=8)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr, momentum=0.9)


class FindsRate(LearningRateFinder):
    """Keeps what was found."""

    def __init__(self) -> None:
        super().__init__(1e-3, 0.3, NUM_TRAINING, early_stop_threshold=None, attr_name="lr")
        self.losses: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        assert self.optimal_lr is not None
        self.losses = self.optimal_lr.results["loss"]


def strategy_of(name: str) -> Any:
    if name == "one":
        return "auto"
    outer = OuterOptimizer()
    others: dict[str, Any] = {
        "ddp": DDPStrategy,
        "diloco": partial(DDPStrategy, sync_every=4, outer=outer),
        "streaming": partial(DDPStrategy, sync_every=4, outer=outer, fragments=2, delay=2),
        "topk": partial(DDPStrategy, "topk", topk_fraction=0.1),
        "servers": partial(ParameterServerStrategy, "async"),
        "hogwild": HogwildStrategy,
        "fsdp": FSDPStrategy,
        "tensor_parallel": partial(
            TensorParallelStrategy, plan={"model.*.linear": "colwise_gather"}
        ),
        "mesh": MeshStrategy,
    }
    return others[name]() if name in others else PipelineStrategy(schedule=name)  # type: ignore[arg-type]


Found = tuple[float, list[float], dict[str, Tensor]]


def fit(name: str, folder: str, callbacks: list[L.Callback], lr: float) -> Found:
    """Gives the rate, the finder's losses, and the weights behind training."""
    module = make_module(Tuned, lr=lr)
    trainer = make_trainer(
        devices=1 if name == "one" else 2,
        strategy=strategy_of(name),
        callbacks=callbacks,
        default_root_dir=folder,
        max_epochs=2,
    )
    trainer.fit(module)
    losses = [loss for finder in callbacks for loss in getattr(finder, "losses", [])]
    return module.lr, losses, state_of(module)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.some("pipedream", "streaming", "topk")
@pytest.mark.parametrize("name", dict.fromkeys([*STRATEGIES, *OTHERS]))
def test_training_goes_on_from_restored_weights(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    found = workers.run(2, fit, name, str(tmp_path), [FindsRate()], 0.05)
    lr, losses, _ = found[0]
    fresh = workers.run(2, fit, name, str(tmp_path), [], lr)
    for tuned, untuned in zip(found, fresh, strict=True):
        assert tuned[:2] == (lr, losses)
        assert difference(tuned[2], untuned[2]) == 0.0
    assert len(losses) == NUM_TRAINING
    assert all(map(math.isfinite, losses))
    if name not in OTHERS:
        ((expected, expected_losses, _),) = workers.run(
            1, fit, "one", str(tmp_path), [FindsRate()], 0.05
        )
        assert lr == pytest.approx(expected)
        assert losses == pytest.approx(expected_losses)


@pytest.mark.parametrize("name", ["servers", "hogwild"])
def test_training_at_a_rate_of_0_leaves_restored_weights(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    tries = LearningRateFinder(
        1e-2, 0.3, NUM_TRAINING, early_stop_threshold=None, update_attr=False
    )
    start = state_of(make_module(Tuned))
    for _, _, weights in workers.run(2, fit, name, str(tmp_path), [tries], 0.0):
        assert difference(weights, start) == 0.0


def refusal_of(search: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, MisconfigurationException)) as raised:
        search()
    return str(raised.value)


def fit_behind_searches(
    name: str, devices: int, folder: str, searches: bool
) -> tuple[list[str], dict[str, Tensor]]:
    """Trains behind Trainers that were to find a batch size; gives what these have said."""
    make = partial(make_trainer, devices=devices, default_root_dir=folder)
    messages = []
    if searches:
        tuner = Tuner(make(strategy=strategy_of(name)))
        messages.append(refusal_of(partial(tuner.scale_batch_size, make_module(Tuned))))
        for method in ("fit", "validate"):
            finds = make(strategy=strategy_of(name), callbacks=[BatchSizeFinder()])
            messages.append(refusal_of(partial(getattr(finds, method), make_module(Tuned))))
    module = make_module(Tuned)
    make(strategy=strategy_of(name), max_epochs=2).fit(module)
    return messages, state_of(module)


@pytest.mark.some("pipedream-2")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", [*STRATEGIES, "tensor_parallel", "mesh"])
def test_searches_for_a_batch_size_are_refused_on_all_ranks_and_leave_nothing(
    workers: WorkerPool, tmp_path: Path, name: str, devices: int
) -> None:
    found = workers.run(devices, fit_behind_searches, name, devices, str(tmp_path), True)
    fresh = workers.run(devices, fit_behind_searches, name, devices, str(tmp_path), False)
    for (messages, weights), (_, expected) in zip(found, fresh, strict=True):
        assert len(messages) == 3
        assert all("not supported with distributed strategies" in message for message in messages)
        assert difference(weights, expected) == 0.0
    assert list(tmp_path.iterdir()) == []

"""What users' hooks do to gradients, weights, loaders and splits: as on a single device."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, ParameterServerStrategy
from tests.helpers.networks.models import (
    Classifier,
    assert_equal,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 32
State = dict[str, Tensor]


class Branches(Classifier):
    """Uses a layer on some ranks only, and clips where gradients are looked at first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.model(x)
        # One of each pair of samples: on two ranks the first one's.
        chosen = torch.arange(len(x)) % 2 == 0 if len(x) == 8 else torch.full((len(x),), is_first())
        if chosen.any():
            logits = torch.where(chosen[:, None], logits + self.extra(logits), logits)
        return F.cross_entropy(logits, y)

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Noisy(Classifier):
    """Adds noise to gradients, and now and then to weights."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=1e-3 * random.random())

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3 * np.random.rand())


class LineSearch(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


class Grows(Classifier):
    """Trains one more layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(1)
            self.model.append(nn.Linear(3, 3).double())
            self.optimizers().add_param_group({"params": [*self.model[-1].parameters()]})


class StepsApart(Classifier):
    """Runs the closure by itself, as to look at the gradients before the update."""

    def optimizer_step(
        self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any = None
    ) -> None:
        closure()
        optimizer.step()


class Tables(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(3, dtype=torch.int16))
        self.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))

    def on_fit_start(self) -> None:
        assert self.order.tolist() == [0, 1, 2]


class GrowingBatches(Classifier):
    """Reads larger batches from the second epoch on."""

    def on_train_epoch_end(self) -> None:
        sampler = self.trainer.train_dataloader.batch_sampler
        sampler.batch_size = 2 * sampler.batch_size


MODULES: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "clips early": (Branches, {}),
    "line search": (LineSearch, {}),
    "grows": (Grows, {"gradient_clip_val": 0.05}),
    "steps apart": (StepsApart, {}),
    "tables": (Tables, {}),
    "growing batches": (GrowingBatches, {}),
}
STRATEGIES = {
    "ddp": DDPStrategy,
    "static": lambda: DDPStrategy(static_graph=True),
    "mesh": lambda: MeshStrategy(dp_replicate=2, dp_shard=1),
    "shards": lambda: MeshStrategy(dp_shard=2),
}


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def loader_of(devices: int) -> DataLoader[Any]:
    """Shares of the same batches, whatever the sampler's batch size becomes."""
    own = range(int(os.environ["RANK"]), NUM_SAMPLES, 2) if devices > 1 else range(NUM_SAMPLES)
    sampler = BatchSampler(SequentialSampler(own), 8 // devices, drop_last=False)
    return DataLoader(Subset(make_data(NUM_SAMPLES), own), batch_sampler=sampler)


def fit(name: str, strategy: str, devices: int) -> State:
    class_, options = MODULES[name]
    module = make_module(class_)
    asked: Any = "auto" if devices == 1 else STRATEGIES[strategy]()
    trainer = make_trainer(devices=devices, strategy=asked, max_epochs=2, **options)
    loader = loader_of(devices)
    trainer.fit(module, loader, loader)
    return state_of(module)


@pytest.mark.some(
    "line search-ddp",
    "grows-ddp",
    "steps apart-ddp",
    "growing batches-ddp",
    "clips early-mesh",
    "steps apart-static",
)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "ddp") for name in MODULES if name != "tables"),  # torch's wrapper refuses them
        ("clips early", "mesh"),
        ("steps apart", "static"),
        ("tables", "shards"),
    ],
)
def test_equals_one_device(workers: WorkerPool, name: str, strategy: str) -> None:
    (expected,) = workers.run(1, fit, name, strategy, 1)
    for state in workers.run(2, fit, name, strategy, 2):
        assert_equal(state, expected)


def fit_noisy() -> State:
    module = make_module(Noisy)
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    make_trainer(devices=2, strategy=DDPStrategy(), max_epochs=2).fit(module, loader, loader)
    return state_of(module)


def test_noise_of_hooks_is_alike(workers: WorkerPool) -> None:
    first, second = workers.run(2, fit_noisy)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Drifts(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        next(self.parameters()).data.mul_(1 + 0.01 * self.global_rank)


def fit_drifting() -> list[str]:
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_module(Drifts), loader, loader)
    return [str(w.message) for w in caught if "other values" in str(w.message)]


def test_replicas_that_drift_apart_are_named_once(workers: WorkerPool) -> None:
    first, second = workers.run(2, fit_drifting)
    assert len(first) == 1
    assert "other values of 'model.0." in first[0]
    assert not second


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        F.cross_entropy(self.model(batch[0]), batch[1]).backward()
        optimizer.step()


def fit_by_hand(strategy: str) -> str:
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer = make_trainer(devices=2, strategy=STRATEGIES[strategy]())
    with pytest.raises(ValueError, match="manual_backward") as raised:
        trainer.fit(make_module(ByHand), loader, loader)
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["ddp", "mesh"])
def test_a_backward_that_averages_nothing_is_refused(workers: WorkerPool, strategy: str) -> None:
    first, second = workers.run(2, fit_by_hand, strategy)
    assert first == second


class Divided(L.LightningDataModule):
    """Divides the samples at random, without a seed."""

    def setup(self, stage: str) -> None:
        order = [*range(NUM_SAMPLES)]
        random.shuffle(order)
        np.random.shuffle(order)
        self.held_out = order[:8]
        self.trained = order[8:]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(make_data(NUM_SAMPLES), self.trained), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(make_data(NUM_SAMPLES), self.held_out), batch_size=4)


def divide() -> list[int]:
    random.seed(int(os.environ["RANK"]))
    np.random.seed(int(os.environ["RANK"]))
    data = Divided()
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), use_distributed_sampler=True)
    trainer.fit(make_module(Classifier), data)
    return data.held_out


def test_random_splits_are_alike(workers: WorkerPool) -> None:
    first, second = workers.run(2, divide)
    assert first == second


class Lookahead(torch.optim.Optimizer):
    """Steps by an optimizer that it has."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Served(Classifier):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.parameters(), lr=0.1))


def fit_served() -> str:
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer = make_trainer(devices=2, strategy=ParameterServerStrategy())
    with pytest.raises(ValueError, match="steps by another optimizer, 'inner'") as raised:
        trainer.fit(make_module(Served), loader, loader)
    return str(raised.value)


def test_a_server_takes_no_optimizer_of_an_optimizer(workers: WorkerPool) -> None:
    first, second = workers.run(2, fit_served)
    assert first == second


class GathersAlone(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.all_gather(self.model(batch[0]).mean())


def validate_unevenly() -> str:
    rank = int(os.environ["RANK"])
    trainer = make_trainer(devices=2, strategy=DDPStrategy())
    loader = make_loader(16 + 8 * rank)
    with pytest.raises(ValueError, match="combine a value in each step") as raised:
        trainer.validate(make_module(GathersAlone), loader)
    return str(raised.value)


def test_gathers_in_steps_need_as_many_batches(workers: WorkerPool) -> None:
    first, second = workers.run(2, validate_unevenly)
    assert first == second


def fit_around_backwards(kind: type) -> list[tuple[str, bool]]:
    seen: list[tuple[str, bool]] = []

    class Around(kind):  # type: ignore[misc]
        def pre_backward(self, closure_loss: Tensor) -> None:
            super().pre_backward(closure_loss)
            seen.append(("before", self.module.model[-1].bias.grad is None))

        def post_backward(self, closure_loss: Tensor) -> None:
            super().post_backward(closure_loss)
            seen.append(("behind", self.module.model[-1].bias.grad is None))

    trainer = make_trainer(devices=2, strategy=Around(), limit_train_batches=2, max_epochs=1)
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES)
    trainer.fit(make_module(), loader, make_loader(8))
    return seen


@pytest.mark.some("DDPStrategy")
@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
def test_a_strategy_made_from_these_sees_each_backward(workers: WorkerPool, kind: type) -> None:
    for seen in workers.run(2, fit_around_backwards, kind):
        assert seen == [("before", True), ("behind", False)] * 2

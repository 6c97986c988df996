"""Hooks and callbacks call a model that is on several stages, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.engine.comms.failures.peer_failure import RankFailedError
from lightning_dist.strategies.pipelining import outside_calls
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

HOOKS = (
    "on_fit_start",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
)


class Calling(L.Callback):
    """Calls the module in a hook, in evaluation mode, with gradients or without."""

    def __init__(self, hook: str) -> None:
        self.seen: list[Tensor] = []
        setattr(self, hook, self._call)

    def _call(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        x = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(3, 2, 6)
        was_training = module.training
        module.eval()
        with torch.set_grad_enabled(len(self.seen) % 2 == 0 and torch.is_grad_enabled()):
            self.seen.append(module(x).detach().clone())
        module.train(was_training)


class Called(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.model(x), -1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 8), nn.LayerNorm(8)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.flatten(1))).relu()
        result: Tensor = self.last(hidden + self.second(hidden))
        return result


class Traced(Called):
    def __init__(self) -> None:
        super().__init__()
        self.model = Branches()


STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "1f1b": lambda: PipelineStrategy(num_microbatches=2),
    "zbv": lambda: PipelineStrategy(schedule="zbv", num_microbatches=2),
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
    "shards": lambda: MeshStrategy(pp=2, dp_shard=2),
}


def fit(name: str, hook: str, kind: type[Classifier]) -> list[Tensor]:
    devices = {"one": 1, "shards": 4}.get(name, 2)
    callback = Calling(hook)
    trainer = make_trainer(
        devices=devices, strategy=STRATEGIES[name](), callbacks=[callback], max_epochs=2
    )
    trainer.fit(make_module(kind), make_loader(24), make_loader(8))
    return callback.seen


@pytest.mark.some("Called-on_train_batch_end-1f1b")
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", [Called, Traced])
def test_hooks_call_the_model(
    workers: WorkerPool, kind: type[Classifier], hook: str, name: str
) -> None:
    (expected,) = workers.run(1, fit, "one", hook, kind)
    assert expected
    for seen in workers.run(2, fit, name, hook, kind):
        for value, tensor in zip(seen, expected, strict=True):
            torch.testing.assert_close(value, tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.some("on_train_batch_end")
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end"])
def test_sharded_stages_are_called(workers: WorkerPool, hook: str) -> None:
    (expected,) = workers.run(1, fit, "one", hook, Called)
    for seen in workers.run(4, fit, "shards", hook, Called):
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.some("on_validation_epoch_end")
@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_train_end"])
def test_asynchronous_stages_are_called_where_nothing_is_in_flight(
    workers: WorkerPool, hook: str
) -> None:
    first, second = workers.run(2, fit, "pipedream", hook, Called)
    assert len(first) == (2 if hook == "on_validation_epoch_end" else 1)
    assert torch.equal(torch.stack(first), torch.stack(second))


def refused(name: str, hook: str) -> str:
    with pytest.raises((ValueError, RankFailedError)) as caught:
        fit(name, hook, Called)
    return str(caught.value)


def test_batches_in_flight_are_in_the_way(workers: WorkerPool) -> None:
    for message in workers.run(2, refused, "pipedream", "on_train_batch_end"):
        assert "has batches in flight" in message
        assert "`on_train_end`" in message


class OnRankZero(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            pl_module(torch.zeros(2, 2, 6).double())


def call_on_rank_zero() -> str:
    trainer = make_trainer(
        devices=2, strategy=PipelineStrategy(), callbacks=[OnRankZero()], max_epochs=2
    )
    with (
        patch.object(outside_calls, "_MOST_SECONDS", 2.0),
        pytest.raises((ValueError, RuntimeError)) as caught,  # rank 1 loses its peer
    ):
        trainer.fit(make_module(Called), make_loader(24), make_loader(8))
    return str(caught.value)


def test_a_call_on_rank_zero_alone_is_named(workers: WorkerPool) -> None:
    first, _ = workers.run(2, call_on_rank_zero)
    assert "other stages have not called it within 2 s" in first
    assert "rank_zero_only" in first


class Player(Called):
    """Makes its batches with its own model, as reinforcement learning does."""

    def play(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in make_data(24):
            with torch.no_grad():
                choice = self.model(x[None]).argmax()
            yield x, (y + choice) % 3

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Played(self.play), batch_size=8)


class Played(IterableDataset[Any]):
    def __init__(self, play: Callable[[], Iterator[Any]]) -> None:
        self._play = play

    def __iter__(self) -> Iterator[Any]:
        return self._play()


def play(devices: int, **options: Any) -> dict[str, Tensor]:
    strategy: Any = PipelineStrategy(**options) if devices > 1 else "auto"
    module = make_module(Player)
    make_trainer(devices=devices, strategy=strategy).fit(module, None, make_loader(8))
    return state_of(module)


def refuse_to_play() -> str:
    with pytest.raises((ValueError, RankFailedError)) as caught:
        play(2)
    return str(caught.value)


def test_a_loader_that_calls_the_model_is_told_at_once(workers: WorkerPool) -> None:
    first, second = workers.run(2, refuse_to_play, timeout=30.0)
    assert "A loader calls the model to make its batches" in first
    assert "read='each'" in second


def test_loaders_of_all_ranks_call_the_model(workers: WorkerPool) -> None:
    ((expected),) = workers.run(1, play, 1)
    parts: dict[str, Tensor] = {}
    for state in workers.run(2, partial(play, read="each"), 2):
        parts |= state
    assert parts.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(parts[key], tensor, rtol=1e-10, atol=1e-12)

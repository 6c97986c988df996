"""Each schedule trains the same bits whether tensors travel point to point or packed over gloo.

``pytest --transport p2p`` runs all other tests of pipelines point to point.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import PipelineStrategy
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from tests.helpers.networks.chosen import chosen
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.parity.test_tied import TiedText, loader

State = dict[str, Tensor]


def fit(module: L.LightningModule, batches: Any, **strategy: Any) -> State:
    """Trains an epoch, whose last batch may be smaller, and validates twice."""
    clip = None if strategy["schedule"] == "pipedream" else 0.05  # it clips by stage, and warns
    return train(module, batches, devices=2, strategy=PipelineStrategy(**strategy), clip=clip)


def train(module: L.LightningModule, batches: Any, *, clip: float | None, **places: Any) -> State:
    trainer = make_trainer(max_epochs=1, gradient_clip_val=clip, **places)
    trainer.fit(module, batches, batches)
    (outputs,) = trainer.validate(module, batches, verbose=False)
    return {**state_of(module), "val_loss": torch.tensor(outputs["val_loss"])}


def fit_over(transport: str, names: tuple[str, ...]) -> dict[str, State]:
    return {
        name: fit(make_module(), make_loader(22), schedule=name, transport=transport)
        for name in names
    }


def fit_alone() -> State:
    return train(make_module(), make_loader(22), devices=1, clip=0.05)


def fit_tied(transport: str, schedule: str) -> State:
    torch.manual_seed(1)
    return fit(TiedText(), loader(), schedule=schedule, transport=transport)


@pytest.fixture(scope="module")
def fitted(request: pytest.FixtureRequest, workers: WorkerPool) -> Any:
    """Runs the schedules over a transport, in one go."""
    names = tuple(chosen(request.session, "fitted", "name", request.path))

    @cache
    def over(transport: str) -> list[dict[str, State]]:
        return workers.run(2, fit_over, transport, names, timeout=120)

    return over


def assert_equal_bits(ranks: list[State], others: list[State]) -> None:
    for rank, other in zip(ranks, others, strict=True):
        assert rank.keys() == other.keys()
        assert len(rank) > 2
        assert [name for name in rank if not torch.equal(rank[name], other[name])] == []


@pytest.mark.some("zbv", "pipedream_2bw")
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_each_schedule_trains_the_same_bits(name: str, fitted: Any) -> None:
    packed, straight = fitted("gloo"), fitted("p2p")
    assert_equal_bits([rank[name] for rank in packed], [rank[name] for rank in straight])


ORDERS = {
    "activations": "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F3,1F2,1B0,1B1,1B2,1B3\n",
    "both": "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n",
    "several stages": "0F2,0F0,0F1,2F1,2F2,2F0,2I0,2B2,2B1,0B1,0I2,0B0,2W0,0W2\n"
    "1F0,1F1,1F2,3F0,3B0,3F2,3F1,3B1,3B2,1B2,1B1,1B0\n",
    "fewer in the last batch": "0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,0B0,0B1,0B2,0B3,0B4,0B5,0B6,0B7\n"
    "1F7,1B7,1F6,1B6,1F5,1B5,1F1,1F0,1F2,1B0,1B2,1B1,1F3,1B3,1F4,1B4\n",
}


@pytest.mark.some("fewer in the last batch")
@pytest.mark.parametrize("order", ORDERS)
def test_stages_may_take_micro_batches_in_other_orders_than_their_neighbours(
    workers: WorkerPool, tmp_path: Path, order: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(ORDERS[order])
    names = (f"file:{path}",)
    packed, straight = (workers.run(2, fit_over, way, names) for way in ("gloo", "p2p"))
    states = [[rank[names[0]] for rank in ranks] for ranks in (packed, straight)]
    assert_equal_bits(*states)
    (alone,) = workers.run(1, fit_alone)
    for name, value in (item for rank in states[1] for item in rank.items()):
        torch.testing.assert_close(value, alone[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.some("zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "pipedream_2bw"])
def test_tied_sums_are_the_same_bits(workers: WorkerPool, schedule: str) -> None:
    packed, straight = (workers.run(2, fit_tied, way, schedule) for way in ("gloo", "p2p"))
    assert_equal_bits(packed, straight)


class Hidden:
    """A batch whose tensors only its user finds."""

    def __init__(self, samples: Any) -> None:
        self.parts = torch.utils.data.default_collate(samples)


class OfHidden(TiedText):
    def training_step(self, batch: Hidden, batch_idx: int) -> Tensor:
        length = 3 - batch_idx
        return super().training_step([part[:, :length] for part in batch.parts], batch_idx)


def train_on_hidden_batches() -> None:
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=1, transport="p2p")
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=2, limit_val_batches=0)
    batches = DataLoader(loader().dataset, batch_size=8, collate_fn=Hidden)
    trainer.fit(OfHidden(), batches, batches)


def test_shapes_of_batches_of_an_unknown_class_are_sent_along(workers: WorkerPool) -> None:
    workers.run(2, train_on_hidden_batches)


def train_with_crops(transport: str, num_microbatches: int) -> str:
    module = TiedText()
    lengths = iter((3, 2) if num_microbatches == 1 else (3, 3, 2, 2))

    def crop(batch: Any, *_: Any) -> Any:
        length = next(lengths)
        tokens, targets = (part.clone()[:, :length] for part in batch)
        loss = TiedText.training_step(module, [tokens, targets], 0)
        return {"loss": loss, "weight": targets.numel()}

    module.training_step = crop  # type: ignore[method-assign]
    strategy = PipelineStrategy(
        schedule="1f1b", num_microbatches=num_microbatches, transport=transport
    )
    steps = 2 if num_microbatches == 1 else 1
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=steps, limit_val_batches=0)
    try:
        trainer.fit(module, loader(), loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", ["gloo", "p2p"])
def test_shapes_may_change_between_batches_that_do_not_tell(
    workers: WorkerPool, transport: str
) -> None:
    assert workers.run(2, train_with_crops, transport, 1) == ["", ""]


def test_shapes_that_the_micro_batch_does_not_tell_need_gloo(workers: WorkerPool) -> None:
    assert workers.run(2, train_with_crops, "gloo", 4) == ["", ""]
    for text in workers.run(2, train_with_crops, "p2p", 4):
        assert "the same shapes" in text
        assert "transport='gloo'" in text


class Thawed(Classifier):
    """Trains its last layers, then all, and then the first ones no more."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model[:4].requires_grad_(batch_idx in (2, 3, 4))
        self.model[5].conv.requires_grad_(batch_idx > 1)  # a part of another rank's layer
        for parameter in self.model[2].norm.parameters():
            parameter.requires_grad = batch_idx == 4


def fit_thawed(devices: int, schedule: str) -> State:
    strategy: Any = "auto"
    if devices > 1:
        strategy = PipelineStrategy(schedule=schedule, transport="p2p", partition="uniform")
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1)
    module = make_module(Thawed)
    trainer.fit(module, make_loader(44), make_loader(8))
    return state_of(module)


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
def test_layers_may_be_frozen_and_thawed_between_batches(
    workers: WorkerPool, schedule: str
) -> None:
    (expected,) = workers.run(1, fit_thawed, 1, schedule)
    found: State = {}
    for rank in workers.run(2, fit_thawed, 2, schedule):
        found |= rank
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)

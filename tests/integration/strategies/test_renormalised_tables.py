"""Embeddings with ``max_norm``, which write into their weight when they look rows up."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    MeshStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
)
from tests.helpers.networks.models import assert_equal, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

WORDS = 7


class Words(L.LightningModule):
    """Guesses the next word, with a head of its own or the table as one."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        table, head = nn.Embedding(WORDS, 6, max_norm=1.0), nn.Linear(6, WORDS, bias=False)
        if is_tied:
            head.weight = table.weight
        layers = (nn.Linear(6, 6) for _ in range(3))
        self.model = nn.Sequential(table, *layers, head)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch)
        return F.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


def make_batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, WORDS, (4, 8, 3), generator=generator)
    return DataLoader(tokens, batch_size=None)  # type: ignore[arg-type]


def fit(devices: int, strategy: Any) -> dict[str, Tensor]:
    module = make_module(Words)
    make_trainer(devices=devices, strategy=strategy, max_epochs=2).fit(module, make_batches())
    return state_of(module)


@pytest.mark.some("traced")
@pytest.mark.parametrize(
    "strategy",
    [
        PipelineStrategy(num_microbatches=4),
        PipelineStrategy(layers="trace", num_microbatches=4),
        MeshStrategy(pp=2),
    ],
    ids=["1f1b", "traced", "mesh"],
)
def test_stages_without_replicas_equal_one_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, found = fit(1, "auto"), dict[str, Tensor]()
    for state in workers.run(2, fit, 2, strategy):
        found |= state
    assert_equal(found, expected)


def refusal_of(strategy: Any, is_tied: bool) -> str:
    trainer = make_trainer(devices=2, strategy=strategy)
    with pytest.raises(ValueError, match="max_norm") as caught:
        trainer.fit(make_module(Words, is_tied=is_tied), make_batches())
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "is_tied", "message"),
    [
        (DDPStrategy(), False, "its own samples"),
        (DDPStrategy(sync_every=2), False, "its own samples"),
        (FSDPStrategy(), False, "its own samples"),
        (MeshStrategy(dp_replicate=2), False, "its own samples"),
        (ParameterServerStrategy("async"), False, "its own samples"),
        (HogwildStrategy(), False, "its own samples"),
        (PipelineStrategy(num_stages=1, num_microbatches=2), False, "its own samples"),
        (PipelineStrategy(schedule="pipedream"), False, "'pipedream' keeps other versions"),
        (PipelineStrategy(), True, "an earlier micro-batch"),
    ],
    ids=["ddp", "local", "fsdp", "mesh", "server", "hogwild", "replicas", "pipedream", "tied"],
)
def test_what_trains_something_else_is_refused(
    workers: WorkerPool, strategy: Any, is_tied: bool, message: str
) -> None:
    first, second = workers.run(2, refusal_of, strategy, is_tied)
    assert first == second
    assert first.startswith("['model.0'] with max_norm")
    assert message in first

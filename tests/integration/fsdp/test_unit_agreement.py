"""Ranks that run other units than each other end, early or late, with an error that says so."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_dist import FSDPStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


class OtherOrder(Classifier):
    """Runs two blocks in another order on one rank, when nobody looks so closely any more."""

    late = 9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        is_late = os.environ["RANK"] == "1" and batch_idx == self.late
        for layer in (*self.model[:2][:: -1 if is_late else 1], *self.model[2:]):
            x = layer(x)
        loss: Tensor = nn.functional.cross_entropy(x, y)
        return loss


class AtTheEnd(OtherOrder):
    late = 11


def fit_long(kind: type[OtherOrder], always: bool) -> tuple[str, int]:
    module = make_module(kind, depth=2)
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(find_unused_parameters=always))
    with pytest.raises(ValueError, match="different units") as caught:
        trainer.fit(module, make_loader(48, 4), make_loader(8))
    return str(caught.value), trainer.global_step


@pytest.mark.some("OtherOrder-True-*")
@pytest.mark.parametrize(
    ("kind", "always", "message", "steps"),
    [
        (OtherOrder, False, "in a step that is over, and may have computed with", 10),
        (AtTheEnd, False, "in a step that is over, and may have computed with", 12),
        (OtherOrder, True, "rank 0 at 'model.0', rank 1 at 'model.1'", 9),
    ],
)
def test_ranks_that_part_later_end_the_run(
    workers: WorkerPool, kind: type[OtherOrder], always: bool, message: str, steps: int
) -> None:
    for text, done in workers.run(2, fit_long, kind, always):
        assert message in text
        assert done == steps

"""A directory is resumed by optimizers of the same groups, or is refused on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.networks.models import Classifier, make_loader, make_module
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import trainer_of

TWO_GROUPS = "a, b"
CHANGED = {
    "b, a": r"groups of [6, 8] parameters, the present one of [8, 6]. Resume with",
    "a and b": "groups of [6, 8] parameters, the present one of [14]. Resume with",
    "b": "groups of [6, 8] parameters, the present one of [8]. Resume with",
    "other a, b": "Parameter group 0 of the checkpoint's optimizer has model.0.conv.weight, where",
    "a; b": "states of 1 optimizers, and `configure_optimizers` made 2. Resume with",
}


class Grouped(Classifier):
    """Has layers in the groups, and the optimizers, that it is told."""

    def __init__(self, groups: str) -> None:
        super().__init__(depth=2)
        self.groups = groups
        self.automatic_optimization = ";" not in groups

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        every = list(self.parameters())
        a, b = every[:6], every[6:]
        groups: dict[str, list[list[Any]]] = {
            TWO_GROUPS: [[a, b]],
            "b, a": [[b, a]],
            "a and b": [[a + b]],
            "b": [[b]],
            "other a, b": [[[*a[1:], b[0]], [a[0], *b[1:]]]],
            "a; b": [[a], [b]],
        }
        return [
            torch.optim.SGD([{"params": group} for group in of_optimizer], 0.1, momentum=0.9)
            for of_optimizer in groups[self.groups]
        ]


def train(name: str, groups: str, epochs: int, path: str, resumes: bool) -> None:
    trainer, _ = trainer_of(name, max_epochs=epochs)
    module = make_module(Grouped, groups=groups)
    trainer.fit(module, make_loader(8), make_loader(8), ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)


def resume_each(name: str, path: str) -> dict[str, str]:
    found = {}
    for groups in CHANGED:
        try:
            train(name, groups, 2, path, True)
            found[groups] = ""
        except ValueError as error:
            found[groups] = str(error)
    train(name, TWO_GROUPS, 2, path, True)
    return found


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "some.ckpt"
    workers.run(2, train, "fsdp-2", TWO_GROUPS, 1, str(path), False)
    return path


NOT_BY_HAND = ("tp-2", "pipeline-gpipe-2")


@pytest.mark.some("fsdp-2", "ddp-2", "pipeline-gpipe-2")
@pytest.mark.parametrize("name", ["fsdp-2", "ddp-2", *NOT_BY_HAND])
def test_other_groups_are_refused(workers: WorkerPool, saved: Path, name: str) -> None:
    for found in workers.run(2, resume_each, name, str(saved), timeout=120.0):
        for groups, words in CHANGED.items():
            refused = "automatic optimization" if ";" in groups and name in NOT_BY_HAND else words
            assert refused in found[groups], groups

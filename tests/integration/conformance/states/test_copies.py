"""A Trainer that is not running holds nothing of a run: it can be copied, and reduces alone."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_dist import DDPStrategy, PipelineStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


def copy_after_runs() -> None:
    bar = TQDMProgressBar()
    trainer = make_trainer(
        devices=2, strategy=DDPStrategy(), callbacks=[bar], enable_progress_bar=True, max_epochs=1
    )
    module = make_module(Classifier)
    loader = make_loader(8)
    runs = (partial(trainer.fit, val_dataloaders=loader), trainer.validate, trainer.predict)
    for run in runs:
        run(module, loader)
        restored = pickle.loads(pickle.dumps(bar))
        assert restored._trainer.global_step == trainer.global_step
        assert copy.deepcopy(trainer).current_epoch == trainer.current_epoch


def test_a_trainer_can_be_copied_behind_a_run(workers: WorkerPool) -> None:
    workers.run(2, copy_after_runs)


@pytest.mark.parametrize("make", [DDPStrategy, PipelineStrategy])
def test_a_rank_reduces_alone_before_a_run(make: type[Any]) -> None:
    strategy = make_trainer(devices=1, strategy=make()).strategy
    value = torch.tensor([2.0, 3.0])
    assert torch.equal(strategy.reduce(value, reduce_op="sum"), value)
    assert torch.equal(strategy.all_gather(value), value)
    assert strategy.reduce_boolean_decision(True)
    assert strategy.broadcast("a word") == "a word"

"""A state dict that is a part of a model is not taken for the whole unnoticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy, TensorParallelStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


def asked(module: nn.Module) -> list[str]:
    """What is warned of when a script asks twice, with the file where it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.state_dict()
        module.state_dict()
    return [f"{Path(w.filename).name}: {w.message}" for w in caught]


def fit(strategy: Strategy, folder: str) -> tuple[Classifier, list[str]]:
    """Saves in the run and behind it, loads and goes on, where a warning would be an error."""
    module = make_module()
    for number, epochs in enumerate((1, 2)):
        trainer = make_trainer(devices=2, strategy=copy.deepcopy(strategy), max_epochs=epochs)
        path = f"{folder}/{type(strategy).__name__}.{number}.ckpt"
        resumed = f"{folder}/{type(strategy).__name__}.0.ckpt" if number else None
        trainer.fit(module, make_loader(8), make_loader(8), ckpt_path=resumed, weights_only=True)
        trainer.save_checkpoint(path)
    return module, asked(module)


def warned_of_network(strategy: Strategy) -> list[str]:
    """What is warned of when a network in the module is asked, as ``save_pretrained`` does."""
    module = make_module()
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=1)
    trainer.fit(module, make_loader(8), make_loader(8))
    return asked(module.model)


def warned_by_all(folder: str) -> tuple[list[list[str]], list[list[str]]]:
    plan = {"model.*.linear": "colwise_gather"}
    strategies = [DDPStrategy(), FSDPStrategy(), TensorParallelStrategy(plan=plan)]
    found = [fit(strategy, folder)[1] for strategy in strategies]
    module, warned = fit(PipelineStrategy(), folder)
    return [*found, warned], copies_of(module)


def copies_of(module: Classifier) -> list[list[str]]:
    return [asked(made) for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)))]


def test_a_part_warns_once_and_the_whole_never(workers: WorkerPool, tmp_path: Path) -> None:
    for warned, of_copies in workers.run(2, warned_by_all, str(tmp_path)):
        whole, *parts = warned
        assert whole == []
        for texts in parts:
            (text,) = texts
            assert text.startswith("test_part_warning.py: module.state_dict() has what this rank")
        assert of_copies == [[], []]  # they have been warned of


@pytest.mark.parametrize("strategy", [PipelineStrategy(), FSDPStrategy()], ids=["stages", "shards"])
def test_a_network_in_the_module_warns_as_well(workers: WorkerPool, strategy: Strategy) -> None:
    for (text,) in workers.run(2, warned_of_network, strategy):
        assert text.startswith("test_part_warning.py: module.state_dict() has what this rank")

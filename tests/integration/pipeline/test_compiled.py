"""A module that torch compiles as a whole, or whose caller is compiled, trains as uncompiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES, find_family
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

SPLIT = ("zb_h1", "zbv")


def fit(schedule: str, how: str) -> tuple[dict[str, Tensor], int]:
    """Trains; returns this rank's parameters, and the most convolutions in a graph.

    Asserts that graphs are compiled for backwards that keep them where backwards are split.
    """
    torch.compiler.reset()
    most = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal most
        if torch.is_grad_enabled():
            assert torch._functorch.config.donated_buffer == (schedule not in SPLIT)
        most = max(most, sum("conv1d" in str(node.target) for node in graph.graph.nodes))
        return graph

    module = make_module()
    if how == "in place":
        module.model.compile(backend=backend)
    elif how == "wrapped":
        module.model = torch.compile(module.model, backend=backend)
    elif how == "step":
        module.training_step = torch.compile(module.training_step, backend=backend)
    overlaps = schedule != "mesh" and find_family(schedule).update_rule.is_asynchronous
    count = {} if overlaps else {"num_microbatches": 2}
    strategy: Any
    if schedule == "mesh":
        strategy = MeshStrategy(pp=2, pipeline=PipelineConfig(partition="uniform", **count))
    else:
        strategy = PipelineStrategy(schedule=schedule, partition="uniform", **count)
    trainer = make_trainer(devices=2, strategy=strategy, limit_val_batches=1, limit_train_batches=4)
    with warnings.catch_warnings():
        # torch's compiler asks any tensor for its gradient, and torch warns of that.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
        trainer.fit(module, make_loader(), make_loader())
    state = {name.replace("_orig_mod.", ""): value for name, value in state_of(module).items()}
    return state, most


@pytest.mark.some("in place-zb_h1")
@pytest.mark.parametrize("schedule", [*SCHEDULE_NAMES, "mesh"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "step"])
def test_compiled_around_the_layers(workers: WorkerPool, how: str, schedule: str) -> None:
    plain = workers.run(2, fit, schedule, "not")
    for (expected, _), (found, most) in zip(plain, workers.run(2, fit, schedule, how), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert most >= (1 if schedule == "mesh" else 2)

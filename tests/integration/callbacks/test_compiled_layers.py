"""What torch has compiled stays compiled when somebody looks, and is never compiled anew for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, PipelineStrategy
from lightning_dist.callbacks import StageBalancer, StepProfiler
from tests.helpers.graphs import Graphs
from tests.helpers.networks.models import Classifier, make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

NUM_LAYERS, WIDTH, BATCH, NUM_MICROBATCHES, NUM_BATCHES = 4, 12, 8, 4, 10
CALLS = {"1f1b": NUM_LAYERS // 2 * NUM_MICROBATCHES, "ddp": NUM_LAYERS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Compiled(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__(optimizer="adamw")
        self.graphs = Graphs()
        blocks: list[Any] = [Block() for _ in range(NUM_LAYERS)]
        if how == "in place":
            for block in blocks:
                block.compile(backend=self.graphs, fullgraph=True)
        if how == "wrapped":
            blocks = [torch.compile(b, backend=self.graphs, fullgraph=True) for b in blocks]
        self.model = nn.Sequential(*blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0].flatten(1))[:, :3], batch[1])


Fitted = tuple[dict[str, Tensor], int, int]


def fit(strategy: str, how: str, directory: str, is_watched: bool) -> Fitted:
    callbacks: list[Any] = []
    if is_watched:
        callbacks.append(StepProfiler(5, 2, directory, warmup_steps=1))
    if is_watched and strategy == "1f1b":
        callbacks.append(StageBalancer(warmup_steps=1, measured_steps=5))
    stages = PipelineStrategy(num_microbatches=NUM_MICROBATCHES, partition="uniform")
    trainer = make_trainer(
        devices=2,
        strategy=stages if strategy == "1f1b" else DDPStrategy(),
        callbacks=callbacks,
        limit_val_batches=0,
        max_steps=NUM_BATCHES,
        max_epochs=-1,
    )
    torch.compiler.reset()  # of the case before, in the same process
    module = make_module(Compiled, how=how)
    batches = DataLoader(make_data(80), batch_size=BATCH)
    with warnings.catch_warnings():
        # torch's compiler asks any tensor for its gradient, and torch warns of that.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
        trainer.fit(module, batches, batches)
    state = {name.replace("_orig_mod.", ""): value for name, value in state_of(module).items()}
    return state, module.graphs.num_made, module.graphs.num_runs


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["1f1b", "ddp"])
def test_compiled_layers(workers: WorkerPool, tmp_path: Path, strategy: str) -> None:
    plain = workers.run(2, fit, strategy, "eager", str(tmp_path), False)
    for how in ("in place", "wrapped"):
        alone = workers.run(2, fit, strategy, how, str(tmp_path), False)
        watched = workers.run(2, fit, strategy, how, str(tmp_path), True)
        for rank, (state, num_made, num_runs) in enumerate(watched):
            expected = plain[rank][0]
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in state)
            assert (num_made, num_runs) == alone[rank][1:]
            assert num_runs == NUM_BATCHES * CALLS[strategy]

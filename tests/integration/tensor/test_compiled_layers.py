"""Layers that the user has compiled, under tensor parallelism."""

from __future__ import annotations

import pytest
import torch

from lightning_dist import TensorParallelStrategy
from lightning_dist.callbacks import MixedPrecision
from tests.helpers.networks.models import make_loader, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.fsdp.test_compiled_units import NUM_BLOCKS, NUM_STEPS, Graphs, Net, quiet

PLAN = {"model.1.*.up": "colwise", "model.1.*.down": "rowwise"}
PIECES = 3  # the norm, the nonlinearity, the sum: around the two sharded layers


def fit(is_compiled: bool, half: str | None) -> tuple[dict[str, torch.Tensor], Graphs]:
    torch.compiler.reset()  # of the case before, in the same process
    graphs = Graphs()
    trainer = make_trainer(
        devices=2,
        strategy=TensorParallelStrategy(plan=PLAN),
        callbacks=[] if half is None else [MixedPrecision(half)],
    )
    module = Net(graphs if is_compiled else None)
    with quiet():
        trainer.fit(module, make_loader(8 * NUM_STEPS), make_loader(8))
    return state_of(module), graphs


@pytest.mark.long
@pytest.mark.parametrize("half", [None, "bf16"])
def test_what_is_around_sharded_layers_is_compiled_once(
    workers: WorkerPool, half: str | None
) -> None:
    expected, found = (workers.run(2, fit, is_compiled, half) for is_compiled in (False, True))
    for (plain, _), (state, graphs) in zip(expected, found, strict=True):
        assert all(torch.equal(plain[name], state[name]) for name in plain)
        pieces, rest = divmod(graphs.num_runs, NUM_BLOCKS * (NUM_STEPS + 1))
        assert rest == 0  # each piece of each block runs compiled in each step
        # Each piece for training, and for evaluation; a cast may be a piece of its own.
        assert (pieces, graphs.num_made) == (PIECES, 2 * PIECES) or half is not None
        assert graphs.num_made <= 2 * pieces + 1

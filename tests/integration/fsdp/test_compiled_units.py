"""Units are compiled whole and once: gathers and our checks stay outside of compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_dist import FSDPStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.wrap import AnyOf, ByClass
from tests.helpers.graphs import Graphs
from tests.helpers.networks.models import make_loader, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

WIDTH, NUM_BLOCKS = 12, 3
NUM_STEPS, NUM_EVALUATED = 12, 2  # more than the steps in which units are compared one by one
NUM_CALLS = NUM_BLOCKS * (NUM_STEPS + NUM_EVALUATED)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Sequential):
    pass


class Net(L.LightningModule):
    """Blocks, which may be compiled where they are built."""

    def __init__(self, graphs: Graphs | None) -> None:
        super().__init__()
        self.graphs = graphs

    def configure_model(self) -> None:
        torch.manual_seed(7)
        blocks = [Block() for _ in range(NUM_BLOCKS)]
        for block in blocks if self.graphs is not None else ():
            block.compile(backend=self.graphs)
        ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.model = nn.Sequential(ends[0], Stack(*blocks), ends[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0].flatten(1).float()), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


MAKE: dict[str, Any] = {
    "fsdp": FSDPStrategy,
    "nested": partial(FSDPStrategy, wrap=AnyOf(ByClass(["Stack"]), ByClass(["Block"]))),
    "hsdp": partial(FSDPStrategy, shard_size=1),
    "recomputed": partial(FSDPStrategy, activation_checkpointing="full"),
    "offloaded": partial(FSDPStrategy, offload="cpu"),
    "unused": partial(FSDPStrategy, find_unused_parameters=True),
}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch's compiler asks any tensor for its gradient, and torch warns of that.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor")
        yield


def fit(name: str, how: str, half: str | None, file: str) -> tuple[dict[str, Tensor], Graphs]:
    torch.compiler.reset()  # of the case before, in the same process
    counters.clear()
    graphs = Graphs()
    trainer = make_trainer(
        devices=2,
        strategy=MAKE[name](compile=how == "strategy", save_full=True),
        callbacks=[] if half is None else [MixedPrecision(half)],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    module = Net(graphs if how == "layers" else None)
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
        trainer.fit(module, make_loader(8 * NUM_STEPS), make_loader(8 * NUM_EVALUATED))
        trainer.save_checkpoint(file)
    graphs.breaks += counters["graph_break"]
    return state_of(module), graphs


def compare(workers: WorkerPool, folder: Path, name: str, how: str, half: str | None) -> Graphs:
    """Compares a compiled run with an eager one; returns what the first rank has compiled."""
    files = {which: str(folder / f"{which}.ckpt") for which in ("eager", how)}
    expected, found = (workers.run(2, fit, name, w, half, file) for w, file in files.items())
    for (plain, _), (state, _) in zip(expected, found, strict=True):
        assert all(torch.equal(plain[key], state[key]) for key in plain)
    saved = [torch.load(file, weights_only=True)["state_dict"] for file in files.values()]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    return found[0][1]


@pytest.mark.some("bf16-fsdp")
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("half", [None, "bf16"])
def test_the_strategy_compiles_each_unit_once(
    workers: WorkerPool, tmp_path: Path, name: str, half: str | None
) -> None:
    """All blocks have one code: it has one graph for training and one for evaluation."""
    graphs = compare(workers, tmp_path, name, "strategy", half)
    again = NUM_BLOCKS * NUM_STEPS if name == "recomputed" else 0
    assert (graphs.num_made, graphs.num_runs, graphs.breaks) == (2, NUM_CALLS + again, [])


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "nested"])
@pytest.mark.parametrize("half", [None, "bf16"])
def test_units_that_the_user_has_compiled(
    workers: WorkerPool, tmp_path: Path, name: str, half: str | None
) -> None:
    """Such a call has the hooks inside, which are not compiled; what is, is compiled once."""
    graphs = compare(workers, tmp_path, name, "layers", half)
    assert (graphs.num_made, graphs.num_runs) == (2, NUM_CALLS)

"""Layers that move while training runs: the same as a restart on the new cut, bit for bit."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint import load_full
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.rebalance.moving_common import (
    STEPS,
    assert_same,
    fit,
)


class Move(L.Callback):
    """Moves layers at the end of the last batch of the first epoch, when batches are in flight."""

    def __init__(self, cut: list[int]) -> None:
        self.cut = cut
        self.gone: list[str] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != STEPS or trainer.current_epoch:
            return
        strategy: Any = trainer.strategy
        before = dict(pl_module.named_parameters())
        state = strategy.optimizers[0].state
        kept = {name: id(p) for name, p in before.items()}
        watched = [(name, weakref.ref(p)) for name, p in before.items()]
        watched += [
            (f"{name}.{key}", weakref.ref(value))
            for name, p in before.items()
            for key, value in state.get(p, {}).items()
            if isinstance(value, Tensor)
        ]
        watched += [(name, weakref.ref(b)) for name, b in pl_module.named_buffers()]
        del before
        gc.disable()  # memory is free at once, not when somebody looks for cycles
        done = strategy.repartition(self.cut)
        assert done.layers_per_stage == tuple(self.cut)
        assert done.moves
        now = dict(pl_module.named_parameters())
        stay = {name.rpartition(".")[0] for name in (*now, *dict(pl_module.named_buffers()))}
        deadline = time.monotonic() + 2.0  # the heartbeat may be looking at this thread's frames
        for name, reference in watched:
            is_here = any(name.startswith(f"{owner}.") for owner in stay)
            while not is_here and reference() is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (reference() is not None) == is_here, name
            self.gone += [] if is_here else [name]
        gc.enable()
        assert all(id(now[name]) == old for name, old in kept.items() if name in now)


def move_and_restart(
    root: str,
    world_size: int,
    strategy: dict[str, Any],
    cuts: tuple[list[int], list[int]],
    module: dict[str, Any],
    half: dict[str, Any] | None,
) -> Any:
    before, after = cuts
    path = f"{root}/middle.ckpt"
    moving = Move(after)
    options: dict[str, Any] = {"trainer": {"devices": world_size}, "half": half}
    moved = fit(strategy, before, 2, module, moving, save=f"{root}/moved.ckpt", **options)
    fit(strategy, before, 1, module, save=path, **options)
    restarted = fit(strategy, after, 2, module, resume=path, **options)
    return moved, restarted, moving.gone


SGD, ADAMW, ADAGRAD = ({"optimizer": name} for name in ("sgd", "adamw", "adagrad"))
CASES: dict[str, tuple[int, dict[str, Any], tuple[list[int], list[int]], dict[str, Any]]] = {
    "1f1b": (2, {"schedule": "1f1b", "num_microbatches": 2}, ([4, 2], [1, 5]), ADAMW),
    "state from the start": (2, {"schedule": "pipedream"}, ([4, 2], [1, 5]), ADAGRAD),
    "stash, past a stage": (3, {"schedule": "pipedream"}, ([4, 1, 1], [1, 1, 4]), SGD),
    "predict": (
        2,
        {"schedule": "pipedream", "staleness_correction": "predict", "log_staleness": True},
        ([2, 4], [5, 1]),
        ADAMW,
    ),
    "2bw": (2, {"schedule": "pipedream_2bw", "num_microbatches": 2}, ([2, 4], [3, 3]), ADAMW),
    "interleaved, both ways": (
        2,
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 2},
        ([1, 2, 1, 2], [2, 2, 1, 1]),
        SGD,
    ),
    "two replicas": (
        4,
        {"num_stages": 2, "schedule": "1f1b", "num_microbatches": 2},
        ([1, 5], [3, 3]),
        SGD,
    ),
    "masters": (2, {"schedule": "pipedream"}, ([4, 2], [1, 5]), ADAMW),
    "masters, all at once": (
        2,
        {"schedule": "1f1b", "num_microbatches": 2},
        ([5, 1], [2, 4]),
        SGD,
    ),
    "half themselves": (2, {"schedule": "1f1b", "num_microbatches": 2}, ([4, 2], [1, 5]), SGD),
}
HALF: dict[str, dict[str, Any]] = {
    "masters": {},
    # Some steps are left out, before the move and after.
    "masters, all at once": {"compute": "fp16", "initial_scale": 2.0**19, "growth_interval": 2},
    "half themselves": {"master_weights": False},
}


@pytest.mark.some("two replicas", "masters, all at once", "2bw")
@pytest.mark.parametrize("name", CASES)
def test_equals_a_restart_on_the_new_cut(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    world_size, strategy, cuts, module = CASES[name]
    half = HALF.get(name)
    ranks = workers.run(
        world_size, move_and_restart, str(tmp_path), world_size, strategy, cuts, module, half
    )
    for moved, restarted, _ in ranks:
        assert moved["cut"] == restarted["cut"] == tuple(cuts[1])
        assert_same(moved, restarted)
        assert moved["updates"] == [2 * STEPS] * len(cuts[0])
        assert moved["spans"] == 2 * STEPS * world_size
    assert any(gone for *_, gone in ranks)
    saved = load_full(tmp_path / "moved.ckpt")["state_dict"]
    assert saved.keys() == {name for moved, *_ in ranks for name in moved["weights"]}
    for moved, *_ in ranks:
        assert all(torch.equal(saved[name], value) for name, value in moved["weights"].items())

"""Stages that are sharded: their gradients travel once, and others go on with what they have saved.

Whichever the schedule, with several stages on a rank, or with backwards in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import FSDPStrategy, MeshStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.wrap import ByName
from tests.helpers.networks.models import Classifier, make_data, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import assert_close, joined

GLOBAL_BATCH, NUM_SAMPLES = 8, 36  # five batches, the last of them half as large
ACCUMULATED, UPDATES = 2, 3  # in an epoch
WRAP = ByName(["model.0"])

# The roots that hold parameters on a rank of the first stage, and of the second; and a unit.
LAYOUTS: dict[str, tuple[tuple[int, int], list[int]]] = {
    "interleaved_1f1b": ((1 + 2, 2), [2, 2, 2, 2]),
    "zbv": ((1 + 2, 2), [2, 2, 2, 2]),
    "zb_h1": ((1 + 1, 1), [4, 4]),
    "looped_bfs": ((1 + 1, 2), [1, 3, 2, 2]),
}


class Synced(Classifier):
    """Asks for its metrics over all ranks."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "sync_dist": True})


def strategy_of(layout: str) -> Any:
    if layout == "one device":
        return "auto"
    if layout == "shards":
        return FSDPStrategy(wrap=WRAP)
    pipeline = PipelineConfig(layout, num_microbatches=2, partition=LAYOUTS[layout][1])
    return MeshStrategy(pp=2, dp_shard=2, pipeline=pipeline, shard=ShardConfig(wrap=WRAP))


class Reductions:
    """Counts the reduce-scatters while entered."""

    # FSDP2 calls the one or the other, by the version of torch.
    NAMES = ("reduce_scatter_single", "reduce_scatter_tensor")

    def __init__(self) -> None:
        self.count = 0
        self._name = next(name for name in self.NAMES if hasattr(dist, name))
        self._original = getattr(dist, self._name)

    def __enter__(self) -> Reductions:
        setattr(dist, self._name, self._counted)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(dist, self._name, self._original)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._original(*args, **kwargs)


def train(layouts: Sequence[str], folder: str) -> tuple[dict[str, Tensor], list[int]]:
    """Trains an epoch under each layout, from what the one before has saved.

    Returns:
        The parameters in the end, and the reductions of each layout.
    """
    counts = []
    for epoch, layout in enumerate(layouts):
        module = make_module(Synced, optimizer="adamw")
        trainer = make_trainer(
            devices=1 if layout == "one device" else 4,
            strategy=strategy_of(layout),
            max_epochs=epoch + 1,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=0.5,
        )
        share = {"num_replicas": 1, "rank": 0}
        if layout != "one device":
            share = trainer.strategy.distributed_sampler_kwargs
        samples = make_data(NUM_SAMPLES)
        sampler: Any = DistributedSampler(samples, shuffle=False, **share)
        loader = DataLoader(samples, GLOBAL_BATCH // share["num_replicas"], sampler=sampler)
        resume = f"{folder}/{epoch - 1}.ckpt" if epoch else None
        with Reductions() as reductions:
            trainer.fit(module, loader, loader, ckpt_path=resume, weights_only=True)
        counts.append(reductions.count)
        if epoch < len(layouts) - 1:
            trainer.save_checkpoint(f"{folder}/{epoch}.ckpt")
    return state_of(module), counts


@pytest.mark.some("few")
@pytest.mark.parametrize(
    "layouts",
    [["zbv", "shards", "looped_bfs"], ["zbv", "shards", *LAYOUTS]],
    ids=["few", "all"],
)
def test_gradients_travel_once_an_update_and_checkpoints_go_on_elsewhere(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: list[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = workers.run(4, train, layouts, str(tmp_path))
    for rank, (_, counts) in enumerate(ranks):
        units = [2 if name == "shards" else LAYOUTS[name][0][rank // 2] for name in layouts]
        assert counts == [num_units * UPDATES for num_units in units]
    single, _ = train(["one device"] * len(layouts), str(tmp_path / "alone"))
    assert_close(joined([state for state, _ in ranks]), single)

"""Replicas of shards, or of stages, that step by themselves equal whole ones that do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_dist import DDPStrategy, MeshStrategy, OuterOptimizer
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.checkpoint.files import REPLICAS
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool
from tests.integration.conformance.common import joined
from tests.integration.ddp.local_steps import (
    NUM_SAMPLES,
    StreamingOracle,
    difference,
    recursion,
)

DILOCO = OuterOptimizer()
MEAN = OuterOptimizer(lr=1.0, momentum=0.0, nesterov=False)
PIPELINE = PipelineConfig(num_microbatches=2, partition=[4, 4])
TENSOR = TensorConfig({"model.*.linear": "colwise_gather"})
SIZES: dict[str, dict[str, int]] = {
    "shards": {"dp_shard": 2},
    "stages": {"pp": 2, "dp_shard": 1},
    "tensor": {"tp": 2, "dp_shard": 1},
}
WHOLE = {"ddp", "whole"}  # replicas, of one rank each


def loader_of(inside: str) -> DataLoader:
    """The batches of this rank: a replica's, or a half of each for each of its shards."""
    rank = int(os.environ["RANK"])
    if inside != "shards":
        return share_of(rank % 2 if inside == "stages" else rank // 2, NUM_SAMPLES)
    replica, shard = divmod(rank, 2)
    own = [s for i, s in enumerate(range(replica, NUM_SAMPLES, 2)) if i // 2 % 2 == shard]
    return DataLoader(Subset(make_data(NUM_SAMPLES), own), batch_size=2)


def strategy_of(inside: str, local: LocalConfig, save_full: bool | None) -> Any:
    if inside == "ddp":
        return DDPStrategy(sync_every=local.sync_every, outer=local.outer)
    return MeshStrategy(
        dp_replicate=2,
        pipeline=PIPELINE,
        tensor=TENSOR,
        local=local,
        save_full=save_full,
        **SIZES.get(inside, {}),
    )


def fit(
    inside: str,
    local: LocalConfig,
    resume: str | None = None,
    folder: str | None = None,
    save_full: bool | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    module = make_module(Classifier, optimizer="adamw" if folder is not None else "sgd")
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = make_trainer(
        devices=2 if inside in WHOLE else 4,
        strategy=strategy_of(inside, local, save_full),
        max_epochs=1 if folder is None else 2,
        limit_val_batches=0,
        enable_checkpointing=folder is not None,
        callbacks=[saves] if folder is not None else [],
        **(options or {}),
    )
    loader = share_of(int(os.environ["RANK"]), NUM_SAMPLES) if inside in WHOLE else None
    trainer.fit(module, loader or loader_of(inside), make_loader(8), ckpt_path=resume)
    return state_of(module)


@contextmanager
def all_alike(ranks: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yields the whole model, of which all ranks have the same."""
    whole = joined(ranks)
    yield whole
    assert all(torch.equal(value, whole[name]) for state in ranks for name, value in state.items())


@pytest.mark.some("stages")
@pytest.mark.parametrize("inside", SIZES)
def test_equals_the_recursion(workers: WorkerPool, inside: str) -> None:
    config = LocalConfig(5, sync_warmup_steps=2, outer=DILOCO)
    with all_alike(workers.run(4, fit, inside, config)) as found:
        assert difference(found, recursion(5, DILOCO, 2)) < 1e-12


def test_whole_replicas_equal_the_recursion(workers: WorkerPool) -> None:
    config = LocalConfig(5, sync_warmup_steps=2, outer=DILOCO)
    for found in workers.run(2, fit, "whole", config):
        assert difference(found, recursion(5, DILOCO, 2)) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("inside", SIZES)
def test_streaming_equals_its_oracle(workers: WorkerPool, inside: str) -> None:
    config = LocalConfig(5, 0, DILOCO, fragments=2, delay=2, alpha=0.5, wire="bf16")
    per_stage = [24, 14] if inside == "stages" else None
    expected = StreamingOracle(config, per_stage).train()
    with all_alike(workers.run(4, fit, inside, config)) as found:
        assert difference(found, expected) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("inside", SIZES)
def test_a_rate_of_1_without_momentum_takes_the_mean_to_the_last_bit(
    workers: WorkerPool, inside: str
) -> None:
    one, other = (joined(workers.run(4, fit, inside, LocalConfig(3, 0, o))) for o in (None, MEAN))
    assert one
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("inside", SIZES)
def test_accumulates_and_clips_as_whole_replicas_do(workers: WorkerPool, inside: str) -> None:
    config, options = LocalConfig(2, outer=DILOCO), {"gradient_clip_val": 0.05}
    options |= {"accumulate_grad_batches": 2}
    whole, _ = workers.run(2, fit, "ddp", config, None, None, None, options)
    with all_alike(workers.run(4, fit, inside, config, None, None, None, options)) as found:
        assert difference(found, whole) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("save_full", [None, True])
@pytest.mark.parametrize("inside", ["shards", "stages"])
def test_a_checkpoint_in_the_middle_of_a_round(
    workers: WorkerPool, inside: str, save_full: bool | None, tmp_path: Path
) -> None:
    config, path = LocalConfig(5, outer=DILOCO), str(tmp_path / "epoch=0.ckpt")
    whole = joined(workers.run(4, fit, inside, config, None, str(tmp_path), save_full))
    resumed = joined(workers.run(4, fit, inside, config, path, str(tmp_path), save_full))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    saved = load_full(path)
    first, second = (saved[key][0]["state"] for key in ("optimizer_states", REPLICAS))
    assert first.keys() == second.keys() == set(range(len(whole)))
    assert not any(torch.equal(first[n]["exp_avg"], second[n]["exp_avg"]) for n in first)
    # The state of each replica's optimizer goes on elsewhere.
    elsewhere, _ = workers.run(2, fit, "ddp", config, path, str(tmp_path))
    assert difference(elsewhere, whole) < 1e-12


def test_pipedream_is_refused() -> None:
    pipedream = PipelineConfig("pipedream")
    with pytest.raises(ValueError, match="keeps older versions"):
        MeshStrategy(pp=2, dp_replicate=2, pipeline=pipedream, local=LocalConfig(5))


def test_one_replica_has_none_to_average_with() -> None:
    with pytest.raises(ValueError, match=r"sync_every=5.*dp_replicate=1 leaves one"):
        MeshStrategy(dp_shard=2, local=LocalConfig(5))


@pytest.mark.long
def test_more_fragments_than_a_stage_has_parameters(workers: WorkerPool) -> None:
    config = LocalConfig(20, 0, DILOCO, fragments=20)
    with pytest.raises(CaseFailedError, match="fragments=20 are more than the 14 parameters"):
        workers.run(4, fit, "stages", config)


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[5].linear = self.model[0].linear


def fit_tied() -> None:
    strategy = MeshStrategy(
        pp=2, dp_replicate=2, dp_shard=1, pipeline=PIPELINE, local=LocalConfig(5, 0, DILOCO, 2)
    )
    make_trainer(devices=4, strategy=strategy).fit(
        make_module(Tied), make_loader(8), make_loader(8)
    )


@pytest.mark.long
def test_fragments_of_shared_parameters(workers: WorkerPool) -> None:
    shared = r"fragments=2: .*'0\.linear\.weight', '5\.linear\.weight'\], would differ"
    with pytest.raises(CaseFailedError, match=shared):
        workers.run(4, fit_tied)

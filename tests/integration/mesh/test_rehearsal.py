"""Steps that are tried on a mesh before it is chosen: on a copy, alike on all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_dist import MeshStrategy
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.group_pool import pool_of_world
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.mesh_runtime.measuring.rehearsal import Rehearsal
from tests.helpers.gpt_parity import data, make_gpt
from tests.helpers.processes.workers import WorkerPool

MESHES = {
    "replicas": MeshShape(dp_replicate=2),
    "shards": MeshShape(dp_shard=2),
    "stages": MeshShape(pp=2),
    "tensor ranks": MeshShape(tp=2),
}


def rehearse(module: L.LightningModule, batch: Any) -> Rehearsal:
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    device = torch.device("cpu")
    return Rehearsal(module, batch, Precision(), device, "gloo", dist.get_rank(), 2, 30.0)


def try_steps(name: str) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, mesh = make_gpt(), MESHES[name]
    module.configure_model()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    batch = tuple(part[:4] for part in data().tensors)
    strategy = MeshStrategy(
        **mesh.sizes,
        pipeline=PipelineConfig(num_microbatches=2),
        tensor=TensorConfig(plan="auto"),
    )
    rehearsal = rehearse(module, batch)
    ranks = pool_of_world().mesh(mesh, "cpu", "gloo")
    taken = rehearsal.seconds(mesh, ranks, strategy.parallelism(mesh))
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    dist.destroy_process_group()
    return taken


@pytest.mark.some("stages")
@pytest.mark.parametrize("name", MESHES)
def test_a_copy_trains(workers: WorkerPool, name: str) -> None:
    first, second = workers.run(2, try_steps, name)
    assert 0 < first == second < 10


class TakesABatch(L.LightningModule):
    """Has layers that tensor ranks share, and a step without ``batch_idx``."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(2)]
        self.model = nn.Sequential(*blocks)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).mean()


def try_tensor_ranks_of_stages() -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, mesh = TakesABatch(), MeshShape(pp=2, tp=2)
    rehearsal = rehearse(module, torch.ones(4, 2))
    styles = {"model.*.0": "colwise", "model.*.2": "rowwise"}
    strategy = MeshStrategy(
        **mesh.sizes,
        pipeline=PipelineConfig(num_microbatches=2),
        tensor=TensorConfig(plan=styles),
    )
    ranks = pool_of_world().mesh(mesh, "cpu", "gloo")
    taken = rehearsal.seconds(mesh, ranks, strategy.parallelism(mesh))
    dist.destroy_process_group()
    return taken


def test_tensor_ranks_of_stages_get_what_their_step_takes(workers: WorkerPool) -> None:
    assert len({*workers.run(4, try_tensor_ranks_of_stages)}) == 1


class FailsAtItsEnd(L.LightningModule):
    """Has a last layer that no stage can run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3))
        self.model[2].register_forward_pre_hook(self.refuse)

    def refuse(self, *_: object) -> None:
        raise ValueError("not on a stage")

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).sum()


def try_to_fail() -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, mesh = FailsAtItsEnd(), MeshShape(pp=2)
    rehearsal = rehearse(module, torch.ones(4, 2))
    strategy = MeshStrategy(pp=2, pipeline=PipelineConfig(num_microbatches=2))
    ranks = pool_of_world().mesh(mesh, "cpu", "gloo")
    with pytest.raises(ValueError, match=r"not on a stage|Another stage") as error:
        rehearsal.seconds(mesh, ranks, strategy.parallelism(mesh))
    dist.barrier()  # all ranks go on together
    dist.destroy_process_group()
    return str(error.value)


def test_a_stage_that_fails_ends_the_others_at_once(workers: WorkerPool) -> None:
    first, second = workers.run(2, try_to_fail, timeout=20.0)
    assert "Another stage has failed" in first
    assert "not on a stage" in second

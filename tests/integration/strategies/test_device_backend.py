"""``process_group_backend`` carries what is on the device; control messages stay on gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import make_loader, make_trainer
from tests.helpers.processes.recording import BACKEND, Collective, register
from tests.helpers.processes.workers import WorkerPool

EVERYONE, REPLICAS, STAGES = (0, 1, 2, 3), (0, 1), (0, 2)  # of rank 0 on a mesh of 2 x 2
WORLD = ()  # the default group, which records no ranks
STEPS = 3
GRADIENT, NORM, VOTE = torch.float32, torch.float64, torch.int32


class Small(L.LightningModule):
    """Logs values that are reduced over the ranks, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        blocks = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.model = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(12, 3))
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0].float()), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0].float())
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        if not isinstance(self.trainer.strategy, DDPStrategy):  # there a metric uses the world
            self.accuracy(logits, batch[1])
            self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def staged(schedule: str, num_microbatches: int = 2) -> Callable[[str], Strategy]:
    return lambda backend: PipelineStrategy(
        num_stages=2,
        schedule=schedule,
        partition="uniform",
        num_microbatches=num_microbatches,
        process_group_backend=backend,
    )


def sharded_stages(backend: str) -> Strategy:
    config = PipelineConfig(partition="uniform", num_microbatches=2)
    return MeshStrategy(pp=2, dp_shard=2, pipeline=config, process_group_backend=backend)


MAKE: dict[str, Callable[[str], Strategy]] = {
    "ddp": lambda backend: DDPStrategy(process_group_backend=backend),
    "local sgd": lambda backend: DDPStrategy(sync_every=2, process_group_backend=backend),
    "fsdp": lambda backend: FSDPStrategy(process_group_backend=backend),
    "sharded stages": sharded_stages,
    "1f1b": staged("1f1b"),
    "2bw": staged("pipedream_2bw"),
    "pipedream": staged("pipedream", num_microbatches=1),
}
CLIPPED = ("ddp", "fsdp", "sharded stages", "1f1b", "2bw")  # by the norm of all stages


def fit(name: str, num_ranks: int, backend: str, world: str) -> list[Collective]:
    """Trains with a loss scale, and validates; gives the collectives of recording groups."""
    record = register()
    dist.init_process_group(world)
    trainer = make_trainer(
        devices=num_ranks,
        strategy=MAKE[name](backend),
        callbacks=[MixedPrecision("fp16", initial_scale=2.0**8)],
        gradient_clip_val=0.1 if name in CLIPPED else None,
    )
    trainer.fit(Small(), make_loader(8 * STEPS), make_loader(8))
    assert {"train_loss_epoch", "val_loss"} <= set(trainer.callback_metrics)
    return record


def forms_a_group(each: Collective) -> bool:
    """A group's first collective, in which all ranks of it meet and nothing is sent."""
    return (each.name, each.size, each.dtype) == ("allreduce", 1, torch.float32)


@pytest.mark.some("ddp-*", "local sgd-*", "1f1b-*", "sharded stages-*")
@pytest.mark.parametrize(
    ("name", "num_ranks", "expected"),
    [
        ("ddp", 2, {(REPLICAS, GRADIENT): STEPS, (REPLICAS, VOTE): STEPS}),
        # The weights are averaged after two steps, and at the end.
        ("local sgd", 2, {(REPLICAS, GRADIENT): 2, (REPLICAS, VOTE): STEPS}),
        (
            "1f1b",
            4,
            {(REPLICAS, GRADIENT): STEPS, (STAGES, NORM): STEPS, (EVERYONE, VOTE): STEPS},
        ),
        (
            "2bw",
            4,
            {(REPLICAS, GRADIENT): STEPS, (STAGES, NORM): STEPS, (EVERYONE, VOTE): STEPS},
        ),
        ("pipedream", 4, {(REPLICAS, GRADIENT): STEPS, (EVERYONE, VOTE): STEPS}),
        (
            "sharded stages",
            4,
            {(REPLICAS, NORM): STEPS, (STAGES, NORM): STEPS, (EVERYONE, VOTE): STEPS},
        ),
    ],
)
def test_gradients_norms_and_votes_use_the_backend(
    workers: WorkerPool, name: str, num_ranks: int, expected: dict[tuple[Any, ...], int]
) -> None:
    """And nothing else: logged values, metrics, stop votes and objects do not."""
    record = workers.run(num_ranks, fit, name, num_ranks, BACKEND, BACKEND)[0]
    formed = {each.ranks for each in record if forms_a_group(each)}
    assert formed >= {ranks for ranks, _ in expected}
    sums = (each for each in record if each.name == "allreduce" and not forms_a_group(each))
    assert Counter((each.ranks, each.dtype) for each in sums) == expected
    names = {each.name for each in record}
    assert {"send", "recv"} <= names or num_ranks == 2  # between stages
    others = names - {"allreduce", "broadcast", "send", "recv"}
    if name == "sharded stages":
        assert "allgather" not in others  # as metrics do
        assert {each.ranks for each in record if each.name in others} == {REPLICAS}
    else:
        assert not others


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_backend_of_an_earlier_world_does_not_matter(workers: WorkerPool, name: str) -> None:
    record = workers.run(2, fit, name, 2, BACKEND, "gloo")[0]
    assert {each.ranks for each in record} == {(0, 1)}
    found = {each.name for each in record}
    reduces = "allreduce" if name == "ddp" else "reduce_scatter"
    assert any(reduces in each for each in found), found
    assert workers.run(2, fit, name, 2, "gloo", BACKEND) == [[], []]

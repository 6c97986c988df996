"""The training in which the faults come; each rank runs it as its script.

A rank says through a pipe when a phase begins, and :mod:`.inject` sends it its signals. An
exception it raises itself. The data's loader says where it is, so that a resumed run can equal the
uninterrupted one to the last bit from every checkpoint.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypedDict

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import (
    AutoStrategy,
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    MeshStrategy,
    OuterOptimizer,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.networks.resumable_loader import ResumableLoader

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DDPStrategy,
    "ddp int8": lambda **kw: DDPStrategy(compression="int8", **kw),
    "ddp topk": lambda **kw: DDPStrategy(compression="topk", topk_fraction=0.1, **kw),
    "diloco": lambda **kw: DDPStrategy(
        sync_every=4, outer=OuterOptimizer(), fragments=2, delay=1, **kw
    ),
    "server": lambda **kw: ParameterServerStrategy(num_servers=2, **kw),
    "server async": lambda **kw: ParameterServerStrategy("async", **kw),
    "server bounded": lambda **kw: ParameterServerStrategy("bounded", 1, **kw),
    "hogwild": HogwildStrategy,
    "auto": lambda **kw: AutoStrategy(replicas=2, **kw),
    "fsdp": FSDPStrategy,
    "fsdp gradients": lambda **kw: FSDPStrategy(shard="gradients", **kw),
    "fsdp optimizer": lambda **kw: FSDPStrategy(shard="optimizer", **kw),
    "tensor": lambda **kw: TensorParallelStrategy(plan={"model.*.linear": "colwise_gather"}, **kw),
    "mesh": lambda **kw: MeshStrategy(pp=2, **kw),
    "1f1b": lambda **kw: PipelineStrategy(schedule="1f1b", **kw),
    "interleaved": lambda **kw: PipelineStrategy(schedule="interleaved_1f1b", **kw),
    "zb_h1": lambda **kw: PipelineStrategy(schedule="zb_h1", **kw),
    "pipedream": lambda **kw: PipelineStrategy(schedule="pipedream", **kw),
    "pipedream_2bw": lambda **kw: PipelineStrategy(schedule="pipedream_2bw", **kw),
    "1f1b 2x2": lambda **kw: PipelineStrategy(schedule="1f1b", num_stages=2, **kw),
    "diloco mesh 2x2": lambda **kw: MeshStrategy(
        dp_replicate=2, dp_shard=2, local=LocalConfig(4, outer=OuterOptimizer()), **kw
    ),
    "mesh 2x2": lambda **kw: MeshStrategy(pp=2, dp_shard=2, **kw),
}
INEXACT = ("ddp int8", "ddp topk", "server async", "server bounded", "hogwild")
"""No checkpoint has what these add of a gradient to the next one, or the order of their updates."""
NUM_RANKS = {name: 4 if name.endswith("2x2") else 2 for name in STRATEGIES}

NUM_EPOCHS = 3
NUM_BATCHES = 6
SAVED_EVERY = 3
NUM_STEPS = NUM_EPOCHS * NUM_BATCHES
MISTAKE = "the user's own mistake"


class Plan(TypedDict):
    """What a rank is told, in a file.

    Attributes:
        strategy: The name of the strategy.
        num_ranks: Of all ranks.
        timeout_seconds: The strategy's ``timeout_s``.
        saves: ``save_top_k`` of the checkpoints.
        async_save: The strategy's; then the last checkpoint is a link.
        checkpoints: The folder for them.
        pipe: The pipe for the phases; empty if none is listening.
        weights: What the files with the final weights are called, without the rank.
        raises: The phases in which a rank raises: a rank, a phase, and the how manieth.
    """

    strategy: str
    num_ranks: int
    timeout_seconds: float
    saves: int
    async_save: bool
    checkpoints: str
    pipe: str
    weights: str
    raises: list[tuple[int, str, int]]


class Phases(L.Callback):
    """Says when phases begin, and raises in some."""

    def __init__(self, plan: Plan) -> None:
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        self.raises = {(phase, time) for rank, phase, time in plan["raises"] if rank == self.rank}
        self.counts: Counter[str] = Counter()
        self.pipe = -1
        if plan["pipe"]:
            with suppress(OSError):  # whatever has listened is gone
                self.pipe = os.open(plan["pipe"], os.O_WRONLY | os.O_NONBLOCK)

    def begin(self, phase: str, *, can_raise: bool = True) -> None:
        self.counts[phase] += 1
        self.say(phase, self.counts[phase])
        if can_raise:
            self.raise_if_due(phase, self.counts[phase])

    def say(self, phase: str, time: int) -> None:
        with suppress(OSError):
            os.write(self.pipe, f"{self.rank} {os.getpid()} {phase} {time}\n".encode())

    def raise_if_due(self, phase: str, time: int) -> None:
        if (phase, time) in self.raises:
            self.say(f"raise_in_{phase}", time)
            raise KeyError(MISTAKE)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        own: Any = trainer.strategy
        drain = own.drain

        def drain_and_say() -> None:
            self.begin("drain", can_raise=False)
            drain()

        own.drain = drain_and_say

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin("step", can_raise=False)

    def on_validation_start(self, *_: Any) -> None:
        self.begin("validation", can_raise=False)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.begin("save")

    def on_train_end(self, *_: Any) -> None:
        self.begin("teardown")

    def on_validation_end(self, *_: Any) -> None:
        self.raise_if_due("drain", self.counts["validation"])  # no user's code runs in a drain


class Troubled(Classifier):
    """Trains in steps of some milliseconds."""

    phases: Phases

    def __init__(self) -> None:
        super().__init__("adamw", schedule_lr=True, depth=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.phases.raise_if_due("step", self.phases.counts["step"])
        time.sleep(0.002)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.phases.raise_if_due("validation", self.phases.counts["validation"])
        time.sleep(0.002)
        super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> ResumableLoader:
        strategy: Any = self.trainer.strategy
        return ResumableLoader(NUM_BATCHES, 8, **strategy.distributed_sampler_kwargs)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_data(16), batch_size=8)


def train(plan: Plan) -> None:
    """Trains from the last checkpoint, if there is one."""
    phases = Phases(plan)
    phases.begin("start")
    torch.set_num_threads(1)
    saves = ModelCheckpoint(
        plan["checkpoints"],
        "{step}",
        every_n_train_steps=SAVED_EVERY,
        save_top_k=plan["saves"],
        save_last="link" if plan["async_save"] else True,
    )
    module = make_module(Troubled)
    module.phases = phases
    trainer = make_trainer(
        devices=plan["num_ranks"],
        strategy=STRATEGIES[plan["strategy"]](
            timeout_s=plan["timeout_seconds"], async_save=plan["async_save"]
        ),
        callbacks=[phases, saves],
        max_epochs=NUM_EPOCHS,
        enable_checkpointing=True,
        default_root_dir=plan["checkpoints"],
    )
    trainer.fit(module, ckpt_path="last", weights_only=True)
    weights = state_of(module)  # gathers shards, behind the run, where nothing names a lost rank
    phases.begin("teardown")  # the rest of it: the process ends
    torch.save(weights, f"{plan['weights']}.{trainer.global_rank}")
    print(f"rank {trainer.global_rank} has trained {trainer.global_step} steps", flush=True)

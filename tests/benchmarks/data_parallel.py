"""Ways to train replicas or shards of the GPT on two processes, each on its half of the batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count as count_up

from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    HogwildStrategy,
    OuterOptimizer,
    ParameterServerStrategy,
)
from tests.benchmarks.contestants import (
    BATCH,
    PlainGPT,
    RunBatch,
    adamw,
    in_lightning,
    loss_of,
    model,
    ratio,
    timed_loop,
)

SHARE = BATCH // 2
RAW_DDP, RAW_FSDP, RAW_FSDP_4 = "torch DDP", "torch FSDP2", "torch FSDP2, accumulate 4"
LIGHTNINGS_DDP = "Lightning's DDPStrategy"
LIGHTNINGS_FSDP = "Lightning's ModelParallelStrategy"
LIGHTNINGS_FSDP_4 = "Lightning's ModelParallelStrategy, accumulate 4"
OURS: dict[str, Callable[[], Strategy]] = {
    **{
        f"our DDPStrategy, {how}": partial(DDPStrategy, how, powersgd_start_step=2)
        for how in ("none", "fp16", "int8", "topk", "powersgd")
    },
    "our DDPStrategy, sync_every=8": partial(DDPStrategy, sync_every=8),
    "our DDPStrategy, DiLoCo, 8": partial(DDPStrategy, sync_every=8, outer=OuterOptimizer()),
    "our DDPStrategy, streaming DiLoCo, 8": partial(
        DDPStrategy, sync_every=8, outer=OuterOptimizer(), fragments=4, delay=2, wire="bf16"
    ),
    "our ParameterServerStrategy, sync": partial(ParameterServerStrategy, "sync", num_servers=2),
    "our ParameterServerStrategy, async": partial(ParameterServerStrategy, "async", num_servers=2),
    "our ParameterServerStrategy, bounded": partial(ParameterServerStrategy, "bounded", 4, 2),
    "our HogwildStrategy": HogwildStrategy,
}
"""Strategies with whole replicas."""
OURS_SHARDED: dict[str, Callable[[], Strategy]] = {
    "our FSDPStrategy": FSDPStrategy,
    "our FSDPStrategy, gradients": partial(FSDPStrategy, shard="gradients"),
    "our FSDPStrategy, optimizer": partial(FSDPStrategy, shard="optimizer"),
}
"""Strategies with shards."""
OURS_FSDP_4 = "our FSDPStrategy, accumulate 4"
REFERENCES = {
    **dict.fromkeys((RAW_DDP, LIGHTNINGS_DDP, *OURS), (RAW_DDP, LIGHTNINGS_DDP)),
    **dict.fromkeys((RAW_FSDP, LIGHTNINGS_FSDP, *OURS_SHARDED), (RAW_FSDP, LIGHTNINGS_FSDP)),
    **dict.fromkeys((RAW_FSDP_4, LIGHTNINGS_FSDP_4, OURS_FSDP_4), (RAW_FSDP_4, LIGHTNINGS_FSDP_4)),
}
"""What a contestant is compared with: the raw loop, and Lightning's own strategy."""


def torch_ddp(rank: int, count: int) -> float:
    return timed_loop(count, ddp_loop(), SHARE)


def ddp_loop() -> RunBatch:
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        loss_of(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def lightning_ddp(rank: int, count: int) -> float:
    return in_lightning(LightningDDPStrategy(), count, SHARE)


def ours(rank: int, count: int, name: str, accumulate: int = 1) -> float:
    strategy = (OURS | OURS_SHARDED)[name]()
    return in_lightning(strategy, count, SHARE, accumulate=accumulate)


def shard_blocks(net: nn.Sequential, mesh: DeviceMesh) -> None:
    """Makes each block a unit, and the root one for embedding and head."""
    for block in net[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def torch_fsdp(rank: int, count: int, accumulate: int) -> float:
    return timed_loop(count, fsdp_loop(accumulate), SHARE)


def fsdp_loop(accumulate: int) -> RunBatch:
    net = model()
    shard_blocks(net, init_device_mesh("cpu", (2,)))
    assert isinstance(net, FSDPModule)
    optimizer = adamw(net.parameters())
    microsteps = count_up(1)

    def run(x: Tensor, y: Tensor) -> None:
        is_last = next(microsteps) % accumulate == 0
        net.set_requires_gradient_sync(is_last)
        (loss_of(net(x), y) / accumulate).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return run


class ShardedGPT(PlainGPT):
    """Shards itself, as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        shard_blocks(self.model, self.device_mesh["data_parallel"])


def lightning_fsdp(rank: int, count: int, accumulate: int) -> float:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return in_lightning(strategy, count, SHARE, ShardedGPT, accumulate)


def print_beside_references(
    times: dict[str, list[float]], references: Mapping[str, Sequence[str]], title: str
) -> None:
    """Prints medians with the fastest and slowest round, and throughput beside the references'."""
    table = Table(title=title)
    table.add_column("")
    for heading in ("ms per batch", "rounds", "x raw loop", "x Lightning's"):
        table.add_column(heading, justify="right")
    for name, values in times.items():
        low, high = min(values) * 1e3, max(values) * 1e3
        ratios = [ratio(times.get(other, []), values) for other in references[name]]
        median = f"{statistics.median(values) * 1e3:.0f}"
        table.add_row(name, median, f"{low:.0f} - {high:.0f}", *ratios)
    Console(width=110).print(table)

"""Pipelines of other packages, which may be installed: no dependency of this project.

*DeepSpeed* has one schedule, 1F1B. Its messages are blocking sends and receives. *torchgpipe* has
one process. It gives each device a thread, and the CPU counts as one device. So its stages take
turns here and use one core.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from tests.benchmarks import contestants as c

DEEPSPEED_1F1B, TORCHGPIPE = "DeepSpeed 1F1B", "torchgpipe"
PACKAGES = {DEEPSPEED_1F1B: "deepspeed", TORCHGPIPE: "torchgpipe"}
"""The package of a contestant."""
INSTALL = {
    "deepspeed": (
        "pip install --no-deps 'deepspeed>=0.19,<0.20' && "
        "pip install einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm"
    ),
    "torchgpipe": "pip install --no-deps torchgpipe==0.0.7",
}
"""How to install each package, without another torch."""


def missing_package(contestant: str) -> str | None:
    """Gives the package that a contestant wants and that is not installed."""
    package = PACKAGES.get(contestant.partition(",")[0])
    return package if package and importlib.util.find_spec(package) is None else None


def print_missing(contestants: Iterable[str]) -> None:
    """Prints how to install the packages of contestants that are not."""
    for package in sorted({p for p in map(missing_package, contestants) if p}):
        Console().print(f"To compare with {package}: {INSTALL[package]}", soft_wrap=True)


def deepspeed(rank: int, count: int, num_microbatches: int) -> float:
    return c.timed_loop(count, deepspeed_loop(rank, num_microbatches))


def deepspeed_loop(rank: int, num_microbatches: int) -> c.RunBatch:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed
    from deepspeed.pipe import PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    with redirect_stdout(io.StringIO()):
        # "uniform" cuts the ten layers as CUT does.
        module = PipelineModule(
            list(c.model()), num_stages=2, loss_fn=c.loss_of, partition_method="uniform"
        )
    assert module.parts == [0, c.CUT[0], sum(c.CUT)]
    config: dict[str, Any] = {
        "train_batch_size": c.BATCH,
        "train_micro_batch_size_per_gpu": c.BATCH // num_microbatches,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 0.0,  # else DeepSpeed clips by a norm of 1, and the others do not
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=c.adamw(module.parameters()), config=config
    )

    def run(x: Tensor, y: Tensor) -> None:
        pieces = (part.chunk(num_microbatches) for part in (x, y))
        engine.train_batch(zip(*pieces, strict=True))

    return run


def torchgpipe(rank: int, count: int, num_microbatches: int) -> float:
    if rank:
        dist.barrier()
        return 0.0
    import torchgpipe

    pipeline = torchgpipe.GPipe(
        c.model(), c.CUT, devices=["cpu", "cpu"], chunks=num_microbatches, checkpoint="never"
    )
    optimizer = c.adamw(pipeline.parameters())

    def run(x: Tensor, y: Tensor) -> None:
        c.loss_of(pipeline(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return c.timed_loop(count, run)

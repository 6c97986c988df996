"""Throughput and bubbles, side by side in one run: ``python -m tests.benchmarks.pipeline``.

Not a test: it prints tables. Each contestant runs several times, in turns, so that a machine whose
speed drifts is fair to all; the tables show medians, and medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.pipeline.measurements import Measurements
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES, PipelineShape, find_family
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from tests.benchmarks import contestants as c
from tests.benchmarks import data_parallel as d
from tests.benchmarks import peers as p
from tests.benchmarks import tensor_parallel as t
from tests.benchmarks import two_axes as a
from tests.benchmarks.quiet import quieten
from tests.benchmarks.sleeping import SleepingLayer
from tests.helpers.processes.workers import WorkerPool

ONE_PROCESS, IDEAL, BASELINE = "one process", "ideal: two that never speak", "torch 1F1B, m=4"

CONTESTANTS: dict[str, tuple[Callable[..., float], tuple[Any, ...]]] = {
    ONE_PROCESS: (c.one_process, ()),
    IDEAL: (c.ideal, ()),
    d.RAW_DDP: (d.torch_ddp, ()),
    d.LIGHTNINGS_DDP: (d.lightning_ddp, ()),
    **{name: (d.ours, (name,)) for name in d.OURS},
    d.RAW_FSDP: (d.torch_fsdp, (1,)),
    d.LIGHTNINGS_FSDP: (d.lightning_fsdp, (1,)),
    **{name: (d.ours, (name,)) for name in d.OURS_SHARDED},
    d.RAW_FSDP_4: (d.torch_fsdp, (4,)),
    d.LIGHTNINGS_FSDP_4: (d.lightning_fsdp, (4,)),
    d.OURS_FSDP_4: (d.ours, ("our FSDPStrategy", 4)),
    t.RAW_TP: (t.torch_tensor_parallel, ()),
    t.LIGHTNINGS_TP: (t.lightning_tensor_parallel, ()),
    "our TensorParallelStrategy": (t.our_tensor_parallel, ()),
    a.RAW_2D: (a.torch_2d, ()),
    a.LIGHTNINGS_2D: (a.lightning_2d, ()),
    a.OURS_2D: (a.our_2d, ()),
    **{f"torch GPipe, m={m}": (c.torch_gpipe, (m,)) for m in (2, 4, 8)},
    **{f"torch 1F1B, m={m}": (c.torch_1f1b, (m,)) for m in (2, 4, 8)},
    f"{p.TORCHGPIPE}, m=4": (p.torchgpipe, (4,)),
    **{f"{p.DEEPSPEED_1F1B}, m={m}": (p.deepspeed, (m,)) for m in (2, 4, 8)},
    **{f"ours gpipe, m={m}": (c.ours, ("gpipe", m)) for m in (2, 4, 8)},
    **{f"ours 1f1b, m={m}": (c.ours, ("1f1b", m)) for m in (2, 4, 8)},
    **{f"torch {name}, m=4": (c.torch_listed, (name, 4)) for name in c.LISTED},
    **{f"ours {name}, m=4": (c.ours, (name, 4)) for name in c.LISTED},
    "ours pipedream": (c.ours, ("pipedream", "auto")),
    "ours pipedream_2bw, m=2": (c.ours, ("pipedream_2bw", 2)),
}

PEERS: dict[str, tuple[str, ...]] = {
    "ours gpipe, m=4": ("torch GPipe, m=4", f"{p.TORCHGPIPE}, m=4"),
    "ours 1f1b, m=4": (BASELINE, f"{p.DEEPSPEED_1F1B}, m=4"),
    **{f"ours {name}, m=4": (f"torch {name}, m=4",) for name in c.LISTED},
}
"""The same schedule of others."""
SYNCHRONOUS_PEERS = tuple(peer for peers in PEERS.values() for peer in peers)
PEERS |= {name: SYNCHRONOUS_PEERS for name in ("ours pipedream", "ours pipedream_2bw, m=2")}

IN_LIGHTNING = (
    *(c.ours, d.lightning_ddp, d.lightning_fsdp, d.ours),
    *(t.lightning_tensor_parallel, t.our_tensor_parallel, a.lightning_2d, a.our_2d),
)


def on_rank(contestant: Callable[..., float], count: int, arguments: tuple[Any, ...]) -> float:
    """Runs one contestant on this worker."""
    quieten()
    rank = int(os.environ["RANK"])
    if contestant not in IN_LIGHTNING:  # which starts the process group itself
        world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return contestant(rank, count, *arguments)


def throughput(workers: WorkerPool, rounds: int, count: int, only: str) -> dict[str, list[float]]:
    wanted = only.split("|")
    times: dict[str, list[float]] = {n: [] for n in CONTESTANTS if any(w in n for w in wanted)}
    turns = [name for _ in range(rounds) for name in times if not p.missing_package(name)]
    for name in track(turns, description="throughput"):
        contestant, arguments = CONTESTANTS[name]
        num_processes = a.NUM_PROCESSES if name in a.REFERENCES else 2
        seconds = workers.run(num_processes, on_rank, contestant, count, arguments, timeout=900)
        times[name].append(max(seconds))
    return times


def print_throughput(times: dict[str, list[float]]) -> None:
    table = Table(title="6.4 M parameter GPT, batch 8 x 128, two processes of one thread")
    for heading in ("", "ms per batch", "x one process", "of the ideal", f"x {BASELINE}"):
        table.add_column(heading, justify="left" if not heading else "right")
    references = [times.get(name, []) for name in (ONE_PROCESS, IDEAL, BASELINE)]
    for name, seconds in times.items():
        ratios = [c.ratio(reference, seconds) for reference in references]
        shown = f"{statistics.median(seconds) * 1e3:.0f}" if seconds else "not installed"
        table.add_row(name, shown, *ratios)
    Console(width=110).print(table)
    p.print_missing(times)


def print_beside_peers(times: dict[str, list[float]]) -> None:
    """Prints our schedules beside the fastest peer: with the same schedule, or synchronous."""
    table = Table(
        title="Beside the fastest peer of the same schedule, or the fastest synchronous one"
    )
    for heading in ("", "fastest peer", "x it", "rounds"):
        table.add_column(heading, justify="right" if heading in ("x it", "rounds") else "left")
    for name, peers in PEERS.items():
        measured = [peer for peer in peers if times.get(peer)]
        if measured and times.get(name):
            best = min(measured, key=lambda peer: statistics.median(times[peer]))
            rounds = [theirs / own for theirs, own in zip(times[best], times[name], strict=True)]
            spread = f"{min(rounds):.3f} - {max(rounds):.3f}"
            table.add_row(name, best, c.ratio(times[best], times[name]), spread)
    if table.rows:
        Console(width=110).print(table)


# --- stages that sleep ---------------------------------------------------------------------------


def sleeping(num_ranks: int, schedule: str, count: int, seconds: float) -> Any:
    """Trains some batches; ``seconds`` is for the forwards of all of a rank's stages."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    homes = find_family(schedule).rank_of_stage(num_ranks)
    channels = connect(MeshShape(pp=num_ranks).groups("pp"), torch.device("cpu"), 60.0, homes)
    per_rank = len(homes) // num_ranks
    net = nn.Sequential(*(SleepingLayer(seconds / per_rank) for _ in homes))
    pieces = {"pipedream": 1, "pipedream_2bw": num_ranks}.get(schedule, count)
    shape = PipelineShape(schedule, pieces, (1,) * len(homes), rank, per_rank)
    pipeline = Pipeline(net, shape, channels.links)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def update() -> None:
        pipeline.install_gradients()
        with pipeline.updating():
            optimizer.step()

    def batch() -> None:
        x = torch.ones(pieces, 4)
        pipeline.train_batch(x, lambda m: net(m.content).mean())
        if pipeline.has_gradients:
            update()

    batch()  # channels and allocators warm up
    for _ in pipeline.drain():
        update()
    dist.barrier()
    pipeline.recorder.clear()
    for _ in range(count // pieces):
        batch()
    for _ in pipeline.drain():
        update()
    spans = [s for part in pipeline.recorder.stretches().values() for s in part]
    pipeline.close()
    channels.close()
    return {0: tuple(spans)}


def print_bubbles(workers: WorkerPool, seconds: float, sizes: list[int], only: str) -> None:
    title = f"Bubble fraction with ranks that sleep {seconds:g} s forward, twice that backward"
    table = Table(title=title)
    for heading in ("schedule", "ranks", "micro-batches", "measured", "closed form", "simulated"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    wanted = only.split("|")
    names = [name for name in SCHEDULE_NAMES if any(w in name for w in wanted)]
    cases = [(n, name) for n in sizes for name in names]
    for num_ranks, schedule in track(cases, description="bubbles"):
        count = 4 * num_ranks
        stretches = workers.run(
            num_ranks, sleeping, num_ranks, schedule, count, seconds, timeout=90
        )
        measured = Measurements(stretches).timeline.bubble_fraction
        homes = find_family(schedule).rank_of_stage(num_ranks)
        per_rank = len(homes) // num_ranks
        simulated = simulate(
            find_family(schedule).build(homes, count),
            StageCosts.uniform(len(homes), seconds / per_rank, 2 * seconds / per_rank),
        ).bubble_fraction
        # Fill and drain around the micro-batches, in parts of a micro-batch's time on a rank.
        parts = {"zb_h1": 3, "zbv": 6}.get(schedule, per_rank)
        closed = (num_ranks - 1) / (parts * count + num_ranks - 1)
        table.add_row(
            schedule,
            str(num_ranks),
            str(count),
            f"{measured:.3f}",
            f"{closed:.3f}",
            f"{simulated:.3f}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--batches", type=int, default=100, help="timed batches of each run")
    parser.add_argument(
        "--only", default="", help="contestants whose name contains one of these, parted by |"
    )
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a sleeping forward")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="that sleep")
    parser.add_argument("--schedules", default="", help="of ranks that sleep, parted by |")
    parser.add_argument("--skip-bubbles", action="store_true")
    parser.add_argument("--skip-throughput", action="store_true")
    options = parser.parse_args()
    workers = WorkerPool()
    try:
        times = (
            {}
            if options.skip_throughput
            else throughput(workers, options.rounds, options.batches, options.only)
        )
        replicas = {name: values for name, values in times.items() if name in d.REFERENCES}
        sharded = {name: values for name, values in times.items() if name in t.REFERENCES}
        meshes = {name: values for name, values in times.items() if name in a.REFERENCES}
        pipelines = {n: v for n, v in times.items() if n not in {*replicas, *sharded, *meshes}}
        pipelines |= {n: v for n, v in times.items() if n == d.LIGHTNINGS_DDP}
        if pipelines.keys() - {d.LIGHTNINGS_DDP}:
            print_throughput(pipelines)
            print_beside_peers(pipelines)
        if replicas:
            title = "The same GPT, data parallelism: batch 2 x 4 x 128, two processes of one thread"
            d.print_beside_references(replicas, d.REFERENCES, title)
        if sharded:
            title = "The same GPT, tensor parallelism: batch 8 x 128, two processes of one thread"
            d.print_beside_references(sharded, t.REFERENCES, title)
        if meshes:
            title = "The same GPT, 2 shards x 2 tensor ranks: batch 2 x 4 x 128, four processes"
            d.print_beside_references(meshes, a.REFERENCES, title)
        if not options.skip_bubbles:
            print_bubbles(workers, options.sleep, options.ranks, options.schedules)
    finally:
        workers.close()


if __name__ == "__main__":
    main()

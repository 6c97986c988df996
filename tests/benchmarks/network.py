"""The same GPT on two hosts with a slow link between: ``python -m tests.benchmarks.network``.

Each rank runs on a host of its own (:mod:`tests.helpers.hosts.cluster`), and a switch limits the
rate between them, each way. The bytes that cross the link are counted. A contestant that sends less
than its algorithm must has another way to its peer, and the bench fails. Needs root and iproute2,
and says so where they are missing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.benchmarks import contestants as c
from tests.benchmarks.data_parallel import LIGHTNINGS_DDP, RAW_DDP
from tests.benchmarks.pipeline import CONTESTANTS, on_rank
from tests.helpers.hosts.cluster import Cluster, Network, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers

RATES = {
    "10 Gbit/s": "10gbit",
    "1 Gbit/s": "1gbit",
    "200 Mbit/s": "200mbit",
    "100 Mbit/s": "100mbit",
}
SECONDS_PER_RUN = 600
FLOAT_BYTES = 4
SHORT = 1  # batches of the run that shows what the start sends


def gradient_bytes(divisor: float = 1.0) -> float:
    """An all-reduce over two ranks: each sends half of the gradient, and half of the result."""
    return FLOAT_BYTES * sum(p.numel() for p in c.model().parameters()) / divisor


def power_sgd_bytes() -> float:
    """A matrix as two factors of rank 1, the least that PowerSGD sends; vectors as they are."""
    shapes = [p.shape for p in c.model().parameters()]
    return FLOAT_BYTES * sum(sum(shape) if len(shape) > 1 else shape[0] for shape in shapes)


def activation_bytes() -> float:
    """One boundary between stages: activations one way, their gradients the other."""
    return FLOAT_BYTES * c.BATCH * c.LENGTH * c.WIDTH


LEAST_BYTES: dict[str, Callable[[], float]] = {
    RAW_DDP: gradient_bytes,
    LIGHTNINGS_DDP: gradient_bytes,
    "our DDPStrategy, none": gradient_bytes,
    "our DDPStrategy, fp16": partial(gradient_bytes, 2),
    "our DDPStrategy, int8": partial(gradient_bytes, 4),
    "our DDPStrategy, topk": partial(gradient_bytes, 100),  # 1 %, whose places are as large
    "our DDPStrategy, powersgd": power_sgd_bytes,
    "our DDPStrategy, sync_every=8": partial(gradient_bytes, 8),
    "our DDPStrategy, DiLoCo, 8": partial(gradient_bytes, 8),
    "our DDPStrategy, streaming DiLoCo, 8": partial(gradient_bytes, 16),
    "our FSDPStrategy": gradient_bytes,  # half for the shards gathered, half for the gradients
    "torch 1F1B, m=4": activation_bytes,
    "ours 1f1b, m=4": activation_bytes,
    "ours pipedream": activation_bytes,
    "ours pipedream_2bw, m=2": activation_bytes,
}
"""What each rank must send in a batch, by contestant, at the least."""


@dataclass(frozen=True)
class Run:
    """One contestant, once.

    Attributes:
        seconds: Per timed batch, of the slower rank.
        sent_bytes: In all, by the host that has sent less; start and warm-up included.
    """

    seconds: float
    sent_bytes: int


def run_as_rank(name: str, count: int) -> float:
    """Trains on this rank; returns seconds per batch."""
    # The contestants ask for two devices, as two ranks of a single host do.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], NODE_RANK="0")
    contestant, arguments = CONTESTANTS[name]
    return on_rank(contestant, count, arguments)


def run_on_hosts(cluster: Cluster, workers: HostWorkers, name: str, count: int) -> Run:
    """Runs one contestant, a rank per host.

    Raises:
        RuntimeError: Less crossed the link than the contestant must send.
    """
    before = [host.traffic() for host in cluster.hosts]
    seconds = workers.run_on([0, 1], run_as_rank, name, count, timeout=SECONDS_PER_RUN)
    pairs = zip(cluster.hosts, before, strict=True)
    sent = min(host.traffic().since(earlier).sent_bytes for host, earlier in pairs)
    needed = LEAST_BYTES[name]() * (count + c.WARMUP)
    if sent < needed:
        raise RuntimeError(
            f"{name}: a host has sent {sent:,} bytes over the link, and its part of"
            f" {count + c.WARMUP} batches is at least {needed:,.0f}. The rest went another way, and"
            " the times say nothing about the link."
        )
    return Run(max(seconds), sent)


def bytes_per_batch(cluster: Cluster, workers: HostWorkers, name: str, count: int) -> float:
    """Returns what a host sends in a batch: a longer run's bytes less a shorter one's."""
    short, long = (run_on_hosts(cluster, workers, name, n) for n in (SHORT, SHORT + count))
    return (long.sent_bytes - short.sent_bytes) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument(
        "--batches", type=int, default=8, help="timed batches of a run, a multiple of 8"
    )
    parser.add_argument(
        "--stage-batches", type=int, default=48, help="of pipelines, which fill once in a run"
    )
    parser.add_argument(
        "--only", default="", help="contestants whose name contains one of these, parted by |"
    )
    parser.add_argument(
        "--rates", nargs="+", default=list(RATES.values()), choices=RATES.values(), help="of a link"
    )
    options = parser.parse_args()
    if why := why_no_hosts():
        sys.exit(f"This benchmark needs hosts of its own: {why}")
    names = [name for name in LEAST_BYTES if any(w in name for w in options.only.split("|"))]
    counts = {
        name: options.stage_batches if LEAST_BYTES[name] is activation_bytes else options.batches
        for name in names
    }
    table = Table(title="6.4 M parameter GPT on two hosts, ms per batch", title_justify="left")
    table.add_column("")
    table.add_column("MB sent", justify="right")
    rates = {title: rate for title, rate in RATES.items() if rate in options.rates}
    columns: list[dict[str, float]] = []
    sent: dict[str, float] = {}
    for title, rate in rates.items():
        table.add_column(title, justify="right")
        table.add_column("x first", justify="right")
        times: dict[str, list[float]] = {name: [] for name in names}
        with hosts(2, networks=[Network(rate=rate)]) as cluster:
            workers = HostWorkers(cluster)
            try:
                if not sent:  # the same at each rate
                    for name in track(names, "bytes of a batch"):
                        sent[name] = bytes_per_batch(cluster, workers, name, 8)
                for name in track([n for _ in range(options.rounds) for n in names], title):
                    run = run_on_hosts(cluster, workers, name, counts[name])
                    times[name].append(run.seconds)
            finally:
                workers.close()
        columns.append({name: statistics.median(values) for name, values in times.items()})
        for name, seconds in columns[-1].items():
            print(f"{title}, {name}: {seconds * 1e3:.0f} ms", flush=True)
    for name in names:
        cells = [
            text
            for medians in columns
            for text in (f"{medians[name] * 1e3:.0f}", f"{medians[names[0]] / medians[name]:.2f}")
        ]
        table.add_row(name, f"{sent[name] / 1e6:.2f}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

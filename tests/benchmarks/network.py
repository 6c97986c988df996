"""The same GPT on two hosts with a slow link between: ``python -m tests.benchmarks.network``.

Each rank runs in a network namespace of its own; a veth pair joins the two, and ``tc`` limits its
rate in both directions. Rendezvous and data go over that link alone. Needs root and iproute2, and
says so where they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.benchmarks.data_parallel import LIGHTNINGS_DDP
from tests.benchmarks.pipeline import CONTESTANTS, on_rank
from tests.helpers.processes.workers import free_port

NAMES = (
    LIGHTNINGS_DDP,
    "our DDPStrategy, none",
    "our DDPStrategy, fp16",
    "our DDPStrategy, powersgd",
    "our DDPStrategy, sync_every=8",
    "our FSDPStrategy",
    "torch 1F1B, m=4",
    "ours 1f1b, m=4",
    "ours pipedream",
)
HOSTS = ("ld-bench-0", "ld-bench-1")
LINKS = ("ldveth0", "ldveth1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
RATES = {"1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
SECONDS_PER_RUN = 600


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Makes two namespaces with a limited link between, and removes them."""
    remove_hosts()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for host, link, address in zip(HOSTS, LINKS, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            command = ["tc", "qdisc", "add", "dev", link, "root", *shape]
            subprocess.run(["ip", "netns", "exec", host, *command], check=True, capture_output=True)
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def run_on_hosts(name: str, count: int) -> float:
    """Runs one contestant, a rank per host; gives seconds per batch of the slower one."""
    port = free_port()
    processes = []
    for rank, (host, link) in enumerate(zip(HOSTS, LINKS, strict=True)):
        environment = {
            **os.environ,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "GLOO_SOCKET_IFNAME": link,
            "OMP_NUM_THREADS": "1",
        }
        module = [sys.executable, "-m", "tests.benchmarks.network"]
        arguments = ["--as-rank", name, "--batches", str(count)]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *module, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=SECONDS_PER_RUN) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{name} failed:\n{errors}")
    return max(json.loads(output.splitlines()[-1]) for output, _ in outputs)


def run_as_rank(name: str, count: int) -> None:
    torch.set_num_threads(1)
    contestant, arguments = CONTESTANTS[name]
    print(json.dumps(on_rank(contestant, count, arguments)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--batches", type=int, default=20, help="timed batches of each run")
    parser.add_argument(
        "--only", default="", help="contestants whose name contains one of these, parted by |"
    )
    parser.add_argument("--as-rank", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        run_as_rank(options.as_rank, options.batches)
        return
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        sys.exit(
            "This benchmark makes network namespaces: run it as root, with iproute2 installed."
        )
    names = [name for name in NAMES if any(w in name for w in options.only.split("|"))]
    table = Table(title="6.4 M parameter GPT on two hosts, ms per batch")
    table.add_column("")
    columns: list[dict[str, float]] = []
    for title, rate in RATES.items():
        table.add_column(title, justify="right")
        table.add_column("x first", justify="right")
        times: dict[str, list[float]] = {name: [] for name in names}
        with two_hosts(rate):
            for name in track([n for _ in range(options.rounds) for n in names], title):
                times[name].append(run_on_hosts(name, options.batches))
        columns.append({name: statistics.median(values) for name, values in times.items()})
    for name in names:
        cells = [
            text
            for medians in columns
            for text in (f"{medians[name] * 1e3:.0f}", f"{medians[names[0]] / medians[name]:.2f}")
        ]
        table.add_row(name, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

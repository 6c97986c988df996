"""Batches between processes: large tensors lie in one file that all of them map."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.batches.mapped_tensors import LARGE_BYTES
from lightning_dist.engine.comms.batches.replica_channel import Event, Reading, open_channel
from tests.helpers.processes.workers import WorkerPool

CPU = torch.device("cpu")
NUM_BATCHES = 5


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(LARGE_BYTES // 4, generator=generator), torch.arange(number)


def is_in_file(tensor: Tensor) -> bool:
    """Whether the elements lie in a file of a batch."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "lightning_dist_batch" in line
    return False


def on_rank() -> tuple[list[bool], int]:
    """Receives batches and spoils each; the first rank sends them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    group = dist.new_group(backend="gloo")
    channel = open_channel(group, CPU, 30.0)
    in_files = []
    for number in range(NUM_BATCHES):
        if channel.is_reader:
            large, small = batch(number)
            channel.send(Reading(0, 0, Event.BATCH, (large, small)))
            large.zero_()
            dist.barrier()
            continue
        found, small = channel.receive(0, 0).content
        assert torch.equal(found, batch(number)[0])
        assert torch.equal(small, batch(number)[1])
        in_files.append(is_in_file(found))
        found.zero_()
        dist.barrier()
        assert not is_in_file(small)
    channel.close()
    dist.barrier()
    left = sum("lightning_dist_batch" in name for name in open_files())
    dist.destroy_process_group()
    return in_files, left


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return found


def test_ranks_of_one_host_map_what_the_reader_has_written(workers: WorkerPool) -> None:
    reader, *others = workers.run(3, on_rank)
    assert reader == ([], 0)
    assert others == [([True] * NUM_BATCHES, 0)] * 2

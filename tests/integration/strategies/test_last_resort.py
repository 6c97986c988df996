"""A process with an unfinished collective can leave, though its peer never answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.workers import free_port

LEAVE = """
import sys
import torch, torch.distributed as dist
from lightning_dist.strategies.last_resort import never_destroy
rank, port, keeps = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "keeps"
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
group = dist.new_group(backend="gloo")
dist.barrier(group)
print("ready", flush=True)
if rank == 0:
    sys.stdin.read()
work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
if keeps:
    never_destroy([group])
raise SystemExit(3)
"""


@pytest.mark.parametrize(("keeps", "leaves"), [("keeps", True), ("does not", False)])
def test_a_process_leaves_an_unfinished_collective_behind(keeps: str, leaves: bool) -> None:
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE, str(rank), port, keeps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        if leaves:
            assert processes[1].wait(20) == 3
        else:  # what the package has to work around; when torch mends it, so can we
            with pytest.raises(subprocess.TimeoutExpired):
                processes[1].wait(5)
    finally:
        for process in processes:
            process.kill()
            process.communicate()

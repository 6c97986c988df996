"""Leaves while a collective waits for a rank that does not answer; run by the tests."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.failures.peer_failure import never_destroy


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    print("ready", flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(60)
    work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    if sys.argv[1] == "keeps":
        never_destroy([group])
    raise SystemExit(3 if work is not None else 4)


if __name__ == "__main__":
    main()

"""A script for torchrun: trains an epoch under each of some strategies, in the same processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.hosts.common import train


def main(folder: Path, strategies: list[str]) -> None:
    torch.set_num_threads(1)
    nodes, devices = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    for strategy in strategies:
        save = str(folder / f"{strategy}.ckpt")
        state = train(strategy, nodes, devices, 1, None, save)
        torch.save(state, folder / f"{strategy}, {os.environ['RANK']}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

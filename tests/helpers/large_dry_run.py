"""A dry run of seven billion parameters on 1,024 ranks, in a process whose memory is looked at."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dist import MeshStrategy
from lightning_dist.strategies.pipeline_config import PipelineConfig
from recipes.gpt import GPT, build_gpt

WIDTH, DEPTH, VOCABULARY, MICROBATCHES = 4096, 32, 32_000, 4
MESH = {"pp": 4, "dp_replicate": 2, "dp_shard": 16, "tp": 8}
WORLD_SIZE = 1024
ANSWER = "answer.pickle"


class LargeGPT(GPT):
    """Seven billion parameters, if built."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.model = nn.Sequential()

    def configure_model(self) -> None:
        if not len(self.model):
            self.model = build_gpt(VOCABULARY, WIDTH, DEPTH, num_heads=32)


def answer() -> tuple[Any, int, int]:
    """Gives what was said, the parameters left in the module, and the peak memory in bytes."""
    module = LargeGPT()
    strategy = MeshStrategy(**MESH, pipeline=PipelineConfig(num_microbatches=MICROBATCHES))
    batch = torch.empty(2, 8, 2048, dtype=torch.int64, device="meta").unbind()
    said = strategy.dry_run(module, WORLD_SIZE, sample_batch=batch)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return said, len(list(module.parameters())), peak_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(ANSWER).write_bytes(pickle.dumps(answer()))

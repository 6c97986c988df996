"""Importing the package costs little: what only some runs need is imported by them."""

from __future__ import annotations

import subprocess
import sys

ONLY_SOME_RUNS = (
    "lightning_dist.callbacks",
    "lightning_dist.engine.checkpoint.shards",  # and torch.distributed.checkpoint with it
    "lightning_dist.plotting",
    "lightning_dist.strategies.mesh_runtime.dry",  # and torch's tools for debugging with it
    "matplotlib",
    "plotly",
    "torch.distributed._tools",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.testing",
)
PROGRAM = """
import sys
import lightning
before = set(sys.modules)
import lightning_dist
print(*sys.modules.keys() - before)
"""


def test_import_leaves_heavy_modules_to_the_runs_that_need_them() -> None:
    done = subprocess.run(
        (sys.executable, "-W", "ignore", "-c", PROGRAM), check=True, capture_output=True, text=True
    )
    imported = done.stdout.split()
    assert "lightning_dist.strategies.ddp" in imported
    assert [name for name in imported if name.startswith(ONLY_SOME_RUNS)] == []

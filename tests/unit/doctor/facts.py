"""Runs as the doctor's checks know them, without any process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_dist.doctor.check import Run
from lightning_dist.doctor.launch import Launch
from lightning_dist.engine.common.mesh_shape import MeshShape

LAUNCH = Launch(
    origin="torchrun, since TORCHELASTIC_RUN_ID is set",
    is_detected=True,
    rank=0,
    world_size=4,
    local_rank=0,
    ranks_per_host=2,
    address="10.0.0.1",
    port=29500,
    serves=False,
)


def make_run(*hosts: str, root: Path = Path("/data"), **launch: Any) -> Run:
    """A run of a rank on each of some hosts."""
    own = replace(LAUNCH, world_size=len(hosts), **launch)
    return Run(own, root, 30.0, dict(enumerate(hosts)), token="token")


def with_mesh(run: Run, **sizes: int) -> Run:
    """The run, under a strategy with a mesh of some sizes."""
    return replace(run, meshes={"mesh": MeshShape(**sizes)})


TWO_HOSTS = make_run("a", "a", "b", "b")
ONE_HOST = make_run("a", "a")

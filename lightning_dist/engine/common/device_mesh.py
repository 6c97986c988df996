"""Builds torch's mesh of ranks, for sharded and replicated tensors.

The sizes are those of :class:`.MeshShape`, which knows no torch. Axes of one rank are left out
where FSDP2 can do without, since each axis of torch's mesh has a process group.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.engine.common.mesh_shape import MeshShape


def build_mesh(shape: MeshShape, device_type: str, backend: str | None = None) -> DeviceMesh:
    """Creates the mesh of all ranks, on the world's backend if None. Collective.

    It has each axis of :data:`.AXES` with more than one rank, and ``dp_shard`` if it has
    ``dp_replicate``, or no other axis.
    """
    axes = {name: size for name, size in shape.sizes.items() if size > 1}
    if not axes or shape.dp_replicate > 1:
        axes = {n: s for n, s in shape.sizes.items() if s > 1 or n == "dp_shard"}
    # Left to itself, torch takes the world's backend, which may be that of an earlier Trainer, and
    # in some versions NCCL for a mesh of GPUs that spans a gloo world.
    override: dict[Any, Any] | None = None
    if backend is not None and (backend, device_type) != (dist.get_backend(), "cpu"):
        override = dict.fromkeys(axes, backend)
    return init_device_mesh(
        device_type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=override
    )


def axis(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Returns this rank's part of a mesh along those of some axes that exist; None if none does."""
    present = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[present] if present else None


def forget_meshes() -> None:
    """Clears what torch keeps by mesh, when a world has ended.

    A later mesh may be equal to an earlier one, but has other process groups: tensors would be
    computed on a mesh whose groups do not exist any more. torch has no public name for that.
    """
    redistribution = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribution is None:  # no tensor has been sharded
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    redistribution._planner_cache.clear()
    redistribution._gen_transform_infos.cache_clear()
    costs = sys.modules["torch.distributed.tensor._collective_utils"]
    costs.MeshTopoInfo.build_from_mesh.cache_clear()

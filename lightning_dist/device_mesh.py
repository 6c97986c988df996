"""torch's mesh of ranks for the axes over which replicas and shards are spread."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.mesh import MeshShape


def build_data_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """Makes the mesh that FSDP2 shards over; all ranks must call it.

    Args:
        shape: Of all ranks; has data axes only.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        With the axis ``dp_shard``, behind ``dp_replicate`` where there is more than one replica.
    """
    assert shape.world_size == shape.data_size
    axes = {"dp_replicate": shape.dp_replicate} if shape.dp_replicate > 1 else {}
    axes["dp_shard"] = shape.dp_shard
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

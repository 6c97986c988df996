"""torch's mesh of ranks, for what is spread over several of them."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.engine.common.mesh_shape import MeshShape


def build_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """Makes the mesh of all ranks; all ranks must call it.

    Args:
        shape: The sizes.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        With each axis of :data:`.AXES` that has more than one rank; with
        ``dp_shard`` beside ``dp_replicate`` too, and where there is no other.
    """
    axes = {name: size for name, size in shape.sizes.items() if size > 1}
    if not axes or shape.dp_replicate > 1:
        axes = {n: s for n, s in shape.sizes.items() if s > 1 or n == "dp_shard"}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def axis(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Gives this rank's part of a mesh along some axes.

    Args:
        mesh: From :func:`build_mesh`.
        names: Of axes.

    Returns:
        With those of the axes that the mesh has; None if it has none of them.
    """
    present = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[present] if present else None

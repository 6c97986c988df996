"""torch's mesh of ranks, for sharded and replicated tensors."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist.engine.common.mesh_shape import MeshShape


def build_mesh(shape: MeshShape, device_type: str) -> DeviceMesh:
    """Creates the mesh of all ranks. Collective: every rank must call it.

    Args:
        shape: Sizes of the mesh.
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        The mesh, with each axis of :data:`.AXES` that has more than one rank. It also has
        ``dp_shard`` if it has ``dp_replicate``, or no other axis.
    """
    axes = {name: size for name, size in shape.sizes.items() if size > 1}
    if not axes or shape.dp_replicate > 1:
        axes = {n: s for n, s in shape.sizes.items() if s > 1 or n == "dp_shard"}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def axis(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Returns this rank's part of a mesh along those of some axes that exist; None if none does."""
    present = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[present] if present else None

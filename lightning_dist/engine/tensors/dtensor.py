"""Whole tensors from shards, and shards of whole tensors.

A sharded parameter is a ``DTensor``. Each rank can cut its own shard without communication; only a
gather is a collective. Each rank needs its heads of a fused query, key and value, so its rows are
no contiguous piece. No public placement describes such rows, so a private one does, made for
parameters that are sharded over two axes of a mesh. torch 2.11 shards by it, but refuses to gather.
So for a gather the matrices get a dim of their own, and public placements describe the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_dist.engine.tensors.tree import map_leaves

_NUMBER = torch.ops.aten._local_scalar_dense.default


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, as a view, or a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stacked(dim: int, num_stacked: int) -> Placement:
    """Returns the placement that shards each of several stacked matrices of one size."""
    return _StridedShard(dim, split_factor=num_stacked)


def stacked_dim(tensor: Tensor) -> int | None:
    """Returns the dim along which a tensor is placed by :func:`stacked`; None if there is none."""
    # Tensor parallelism is the innermost axis of a mesh.
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    return int(placement.dim) if isinstance(placement, _StridedShard) else None


def unstacked(tensor: DTensor) -> DTensor:
    """Returns a view of a stacked tensor with a new dim for the matrices, before the stacked dim.

    Args:
        tensor: A tensor placed by :func:`stacked`, with equal numbers of rows on all ranks.
    """
    dim, placement = stacked_dim(tensor), tensor.placements[-1]
    assert dim is not None
    assert isinstance(placement, _StridedShard)
    num_stacked = int(placement.split_factor)
    sizes = [num_stacked, tensor.shape[dim] // num_stacked]
    shape = torch.Size([*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]])
    return DTensor.from_local(
        tensor.to_local().unflatten(dim, (num_stacked, -1)),
        tensor.device_mesh,
        [*(_behind(dim, outer) for outer in tensor.placements[:-1]), Shard(dim + 1)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _behind(dim: int, placement: Placement) -> Placement:
    """Returns a placement for the tensor with the new dim."""
    if isinstance(placement, Shard):
        assert placement.dim != dim, "no axis shards what is stacked along the dim"
        return Shard(placement.dim + (placement.dim > dim))
    return placement


def is_dtensor(tensor: Any) -> bool:
    """Returns whether a value is a DTensor."""
    return isinstance(tensor, DTensor)


def is_overcut(tensor: Tensor) -> bool:
    """Returns whether a dim of a DTensor is sharded over more ranks than it has entries."""
    if not isinstance(tensor, DTensor):
        return False
    ranks = [1] * tensor.ndim
    for num_ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            ranks[placement.dim] *= num_ranks
    return any(count > size for count, size in zip(ranks, tensor.shape, strict=True))


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shards a whole tensor like another tensor, without communication.

    Args:
        full: The whole tensor, the same on all ranks; its dtype is the result's.
        like: A DTensor with the placements of the result, or a plain tensor to return ``full``.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    return cut(full, like.device_mesh, like.placements)


def replicate_like(full: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor in a form that can be mixed with another one, without communication.

    Args:
        full: The whole tensor, the same on all ranks, of any shape.
        like: A DTensor with the mesh of the result, or a plain tensor to return ``full``.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    return cut(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def cut(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Shards a whole tensor, without communication.

    Args:
        full: The whole tensor, the same on all ranks; may be on the meta device.
        mesh: Mesh of the ranks.
        placements: One placement for each axis of the mesh.

    Returns:
        A DTensor on the device of the mesh.
    """
    on_device = full.detach()
    if not on_device.is_meta:
        on_device = on_device.to(mesh.device_type)
    # Without a source rank each rank slices its own tensor, in place of a scatter.
    part = distribute_tensor(on_device, mesh, placements, src_data_rank=None)
    # A copy, for a shard can be a view that would keep the whole tensor alive.
    return from_shard(part.to_local().clone(), part)


def crashes_in_gathers(backend: str, device_type: str) -> bool:
    """Returns whether torch's all-gather of DTensors crashes the process (pytorch#152645).

    It calls ``allgather_into_tensor_coalesced``, and gloo's reads a GPU's memory as if it were the
    host's.
    """
    return backend == "gloo" and device_type != "cpu"


def whole(tensor: Tensor) -> Tensor:
    """Gathers a DTensor; a plain tensor is returned. Collective: every rank must call it.

    Args:
        tensor: Any tensor. Shards in host memory, of an offloaded model or after a run, are
            gathered on the device of the mesh, whose backend may take no others. Over gloo all
            shards are gathered in host memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    backend = dist.get_backend(tensor.device_mesh.get_group(0))
    if crashes_in_gathers(backend, tensor.device_mesh.device_type):
        in_host = tensor.cpu()
        assert isinstance(in_host, DTensor)
        return in_host.full_tensor().to(tensor.device)
    dim = stacked_dim(tensor)
    if dim is not None:
        return unstacked(tensor).full_tensor().flatten(dim, dim + 1)
    if tensor.device.type != tensor.device_mesh.device_type:
        moved = from_shard(tensor.to_local(), tensor)
        assert isinstance(moved, DTensor)
        return moved.full_tensor()
    return tensor.full_tensor()


def is_storable(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor of which each rank has one contiguous piece."""
    return isinstance(tensor, DTensor) and stacked_dim(tensor) is None


def storable(tensor: Tensor) -> Tensor:
    """Returns a tensor that distributed checkpoints support. Collective: every rank must call it.

    Args:
        tensor: Any tensor; summands are added up, and stacked matrices are gathered along the
            innermost axis of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    if placements != [*tensor.placements]:
        moved = from_shard(tensor.to_local(), tensor)
        assert isinstance(moved, DTensor)
        tensor = moved.redistribute(placements=placements)
    dim = stacked_dim(tensor)
    if dim is None:
        return tensor
    split = unstacked(tensor)
    gathered = split.redistribute(split.device_mesh, [*split.placements[:-1], Replicate()])
    own = gathered.to_local().flatten(dim, dim + 1)
    return from_shard(own, tensor, [*tensor.placements[:-1], Replicate()])


def from_shard(own: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Returns the DTensor with given shards, without communication.

    Args:
        own: This rank's shard; it is moved to the device of the mesh.
        like: A DTensor of the result's mesh and shape, or a plain tensor to return ``own``.
        placements: Placements of the result; None for those of ``like``.
    """
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def gather(tree: Any, *, keep: bool) -> Any:
    """Gathers the sharded tensors of a tree. Collective: every rank of their mesh must call it.

    Args:
        tree: A tree of the same structure on each rank.
        keep: Whether this rank needs the result. If not, the rank takes part in each collective,
            but never holds more than one whole tensor.

    Returns:
        The tree with whole tensors on the CPU for the sharded ones; None unless ``keep``.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        full = whole(leaf.detach())
        return full.cpu() if keep else None

    result = map_leaves(gathered, tree)
    return result if keep else None


def take_whole_numbers() -> Callable[[], None]:
    """Lets ``if``, ``float`` and ``.item()`` of a DTensor take the number of the whole tensor.

    torch takes that of a rank's part, so ranks would take other branches (``if
    torch.isnan(p.grad).any()``). All ranks must ask for it. torch has no public way to change that,
    but a table of functions in the place of operations on DTensors.

    Returns:
        A function that ends this.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers.get(_NUMBER)
    handlers[_NUMBER] = _number_of_whole

    def undo() -> None:
        if before is None:
            handlers.pop(_NUMBER, None)
        else:
            handlers[_NUMBER] = before

    return undo


def _number_of_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return operation(local_part(tensor) if is_whole else whole(tensor))

"""Keeps what users' code writes into weights while they are gathered.

On one device a step may write into weights: a teacher that follows its student, a mask that a layer
multiplies onto its own weight. While a unit's forward runs, FSDP2 has whole copies in place of the
shards, and frees them later with all that was written. So each rank copies its own part back into
its shard; before the backward, too, for the root stays gathered and hooks may write. That is done
in any case: ``weight.data.mul_(...)`` leaves no trace. Where the copies are in half precision, only
what has left a trace is taken, for the shards are more exact.

All ranks must write the same, as replicas must.

Of FSDP2's parameters this module reads ``fsdp_params``, ``_unsharded_param``, ``fsdp_placement``
and ``mesh_info``; no public function gives a gathered copy and its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.fully_shard import groups_of
from lightning_dist.engine.tensors.dtensor import local_part


class WrittenWeights:
    """Copies weights back after each forward of a unit.

    Args:
        roots: The sharded roots, with their units in them.
    """

    def __init__(self, roots: Iterable[FSDPModule]) -> None:
        modules = [part for root in roots for part in cast(nn.Module, root).modules()]
        self._units = [_Unit(module) for module in modules if isinstance(module, FSDPModule)]

    def keep(self) -> None:
        """Copies back once more what is still gathered, as hooks between two passes find it."""
        for unit in self._units:
            unit.keep()


class _Unit:
    """One unit of FSDP2.

    Args:
        module: The unit's module.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._groups = groups_of(module)
        self._gathered: list[tuple[Any, Tensor, int]] = []
        hooked = cast(nn.Module, module)
        hooked.register_forward_pre_hook(self._begin)  # behind FSDP2's own
        hooked.register_forward_hook(self._end, prepend=True)  # ahead of it

    def __deepcopy__(self, memo: object) -> _Unit:
        """Returns itself: a copy of the module is no unit."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: object) -> None:
        found = [p for group in self._groups for p in group.fsdp_params]
        whole = [(p, p._unsharded_param) for p in found if hasattr(p, "_unsharded_param")]
        self._gathered = [(p, copy.data, copy._version) for p, copy in whole]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *_: object) -> None:
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Copies back what is gathered."""
        shards, parts = [], []
        for parameter, data, version in self._gathered:
            copy = parameter._unsharded_param
            if local_part(copy.detach()).untyped_storage().size() == 0:
                continue  # freed
            is_replaced = _memory_of(copy) != _memory_of(data)
            if is_replaced:  # `weight.data = ...`
                local_part(data).copy_(local_part(copy.data))
                copy.data = data
            shard = local_part(parameter.sharded_param)
            if data.dtype == shard.dtype or is_replaced or copy._version != version:
                part = _part_of(local_part(data), parameter)
                if part.numel():
                    shards.append(shard)
                    parts.append(part)
        if shards:
            torch._foreach_copy_(shards, parts)


def _memory_of(tensor: Tensor) -> int:
    """Identifies a tensor's memory, of one without values, too, which has no address."""
    place: int = local_part(tensor.detach()).untyped_storage()._cdata
    return place


def _part_of(whole: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's part of a gathered weight, a view."""
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    chunks = torch.chunk(whole, mesh.shard_mesh_size, dim)
    rank: int = mesh.shard_mesh_rank
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)

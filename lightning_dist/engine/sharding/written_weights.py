"""Keeps what users' code writes into weights while they are gathered.

On one device a step may write into weights: a teacher that follows its student, a mask that a layer
multiplies onto its own weight. While a unit's forward runs, FSDP2 has whole copies in place of the
shards, and frees them later with all that was written. So each rank copies its own part back into
its shard. That is done in any case: ``weight.data.mul_(...)`` leaves no trace. Where the copies are
in half precision, only what has left a trace is taken, for the shards are more exact.

All ranks must write the same, as replicas must.

Weights that no forward frees are copied back once, at the end of the step, which may write into
them behind their call. A stage's weights stay gathered for all micro-batches of a round: they are
copied back before the backward that frees them.

Of FSDP2 this module reads private attributes; no public function gives a gathered copy and its
place. FSDP2 makes a copy once, and then only frees and allocates its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.fully_shard import wait_for_writes
from lightning_dist.engine.sharding.gathered import groups_of
from lightning_dist.engine.tensors.dtensor import local_part


class WrittenWeights:
    """Copies weights back after each forward of a unit.

    Args:
        roots: The sharded roots, with their units in them.
        in_rounds: Whether :meth:`keep` will be called before the backward that frees the units, so
            that those which no forward frees are copied back then only.
    """

    def __init__(self, roots: Iterable[FSDPModule], *, in_rounds: bool = False) -> None:
        self._roots = [*roots]
        modules = [part for root in self._roots for part in cast(nn.Module, root).modules()]
        self._units = [_Unit(m, in_rounds) for m in modules if isinstance(m, FSDPModule)]

    def begin_round(self) -> None:
        """Forgets an earlier round, which may have failed."""
        for unit in self._units:
            unit.is_waiting = False

    def keep(self) -> None:
        """Copies back what is still gathered, at the end of a step's forward."""
        for unit in self._units:
            unit.keep()
        self._let_gathers_wait()

    def keep_waiting(self) -> None:
        """Copies back the units that wait for :meth:`keep`, after a forward without a backward."""
        for unit in self._units:
            if unit.is_waiting:
                unit.keep()
        self._let_gathers_wait()

    def _let_gathers_wait(self) -> None:
        for root in self._roots:
            wait_for_writes(root)


class _Weight:
    """One weight of a unit, given FSDP2's description of it, while its copy is gathered."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.copy: Tensor = parameter._unsharded_param
        with torch.inference_mode(False):
            self._data = self.copy.data
            self.part = _part_of(local_part(self._data), parameter)
        self._memory = _memory_of(self._data)
        self._storage = local_part(self._data).untyped_storage()

    @property
    def is_gathered(self) -> bool:
        return self._storage.size() > 0

    @property
    def shard(self) -> Tensor:
        found: Tensor = self.parameter.sharded_param
        return local_part(found)

    def take_back(self) -> bool:
        """Undoes ``weight.data = ...``; returns whether it had been done. The values stay."""
        if _memory_of(self.copy) == self._memory:
            return False
        local_part(self._data).copy_(local_part(self.copy.data))
        self.copy.data = self._data
        return True


class _Unit:
    """One unit of FSDP2; it is waiting if nothing was copied back after the last forward."""

    def __init__(self, module: FSDPModule, in_rounds: bool) -> None:
        self._groups, self._in_rounds = groups_of(module), in_rounds
        self._weights: list[_Weight] = []
        self._versions: list[int] = []
        self.is_waiting = False
        hooked = cast(nn.Module, module)
        hooked.register_forward_pre_hook(self._begin)  # behind FSDP2's own
        hooked.register_forward_hook(self._end, prepend=True)  # ahead of it

    def __deepcopy__(self, memo: object) -> _Unit:
        return self  # a copy of the module is no unit

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: object) -> None:
        if self.is_waiting:
            return
        found = [p for group in self._groups for p in group.fsdp_params]
        copies = [p._unsharded_param for p in found if hasattr(p, "_unsharded_param")]
        pairs = zip(self._weights, copies, strict=False)
        if len(self._weights) != len(copies) or any(w.copy is not copy for w, copy in pairs):
            self._weights = [_Weight(p) for p in found if hasattr(p, "_unsharded_param")]
        self._versions = [copy._version for copy in copies]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *_: object) -> None:
        frees = any(group._reshard_after_forward for group in self._groups)
        self.is_waiting = self._in_rounds and not frees and torch.is_grad_enabled()
        if not self.is_waiting:
            self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        self.is_waiting = False
        shards, parts = [], []
        for weight, version in zip(self._weights, self._versions, strict=True):
            if not weight.is_gathered:
                continue
            is_replaced, shard, part = weight.take_back(), weight.shard, weight.part
            is_written = is_replaced or weight.copy._version != version
            if part.numel() and (is_written or part.dtype == shard.dtype):
                shards.append(shard)
                parts.append(part)
        if shards:
            torch._foreach_copy_(shards, parts)


def _memory_of(tensor: Tensor) -> int:
    """Identifies a tensor's memory, of one without values, too, which has no address."""
    place: int = local_part(tensor.detach()).untyped_storage()._cdata
    return place


def _part_of(whole: Tensor, parameter: Any) -> Tensor:
    mesh, dim = parameter.mesh_info, parameter.fsdp_placement.dim
    chunks = torch.chunk(whole, mesh.shard_mesh_size, dim)
    rank: int = mesh.shard_mesh_rank
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)

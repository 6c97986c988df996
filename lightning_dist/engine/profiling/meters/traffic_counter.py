"""Count the collectives that a piece of code calls, directly or not.

FSDP2, ``DTensor`` and this package call a process group in different ways, but all calls pass
torch's dispatcher. So do autograd's calls on a CPU, which run in the thread of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.traffic import MessageKind, TrafficLedger
from lightning_dist.engine.tensors.tree import tensors_in

_DIRECT, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional

_KINDS: Mapping[Any, MessageKind] = MappingProxyType(
    {
        _DIRECT._allgather_base_: MessageKind.ALL_GATHER,
        _DIRECT.allgather_: MessageKind.ALL_GATHER,
        _DIRECT.allgather_coalesced_: MessageKind.ALL_GATHER,
        _DIRECT.allgather_into_tensor_coalesced_: MessageKind.ALL_GATHER,
        _FUNCTIONAL.all_gather_into_tensor: MessageKind.ALL_GATHER,
        _FUNCTIONAL.all_gather_into_tensor_coalesced: MessageKind.ALL_GATHER,
        _DIRECT._reduce_scatter_base_: MessageKind.REDUCE_SCATTER,
        _DIRECT.reduce_scatter_: MessageKind.REDUCE_SCATTER,
        _DIRECT.reduce_scatter_tensor_coalesced_: MessageKind.REDUCE_SCATTER,
        _FUNCTIONAL.reduce_scatter_tensor: MessageKind.REDUCE_SCATTER,
        _FUNCTIONAL.reduce_scatter_tensor_coalesced: MessageKind.REDUCE_SCATTER,
        _DIRECT.allreduce_: MessageKind.ALL_REDUCE,
        _DIRECT.allreduce_coalesced_: MessageKind.ALL_REDUCE,
        _FUNCTIONAL.all_reduce: MessageKind.ALL_REDUCE,
        _FUNCTIONAL.all_reduce_: MessageKind.ALL_REDUCE,
        _FUNCTIONAL.all_reduce_coalesced: MessageKind.ALL_REDUCE,
        _FUNCTIONAL.all_reduce_coalesced_: MessageKind.ALL_REDUCE,
        _DIRECT.alltoall_: MessageKind.ALL_TO_ALL,
        _DIRECT.alltoall_base_: MessageKind.ALL_TO_ALL,
        _FUNCTIONAL.all_to_all_single: MessageKind.ALL_TO_ALL,
        _DIRECT.broadcast_: MessageKind.BROADCAST,
        _FUNCTIONAL.broadcast: MessageKind.BROADCAST,
        _FUNCTIONAL.broadcast_: MessageKind.BROADCAST,
        _DIRECT.send: MessageKind.SEND,
    }
)


class TrafficCounter:
    """Adds collectives over a mesh to a ledger; those in a group of one rank do not count."""

    def __init__(self, ledger: TrafficLedger, mesh: MeshShape) -> None:
        self._ledger = ledger
        self._mesh = mesh

    def counts(self, func: Any) -> bool:
        """Returns whether an operation of torch is a collective."""
        return packet_of(func) in _KINDS

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Adds an operation, if it is a collective, given its arguments and result."""
        kind = _KINDS.get(packet_of(func))
        if kind is None:
            return
        axes = self._mesh.axes_between(ranks_of_collective(func, args, kwargs))
        if axes:
            num_bytes = max(map(_bytes_of, (*args, *kwargs.values(), result)))
            self._ledger.add(kind, axes, num_bytes)


def ranks_of_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Returns the global ranks that take part in a collective, given its arguments."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:
        group = _resolve_process_group(given["group_name"])
    return dist.get_process_group_ranks(group)


def packet_of(func: Any) -> Any:
    """Returns an operation without its overload; ``torch.cond`` and the like have none."""
    return getattr(func, "overloadpacket", func)


def _bytes_of(argument: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(argument))

"""A backend with a name of its own, over gloo, that records the collectives of its groups.

What goes over it has asked for the run's backend. So a CPU shows what would go over NCCL on GPUs,
and what stays on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "recording"
_GLOO = dist.ProcessGroup.BackendType.GLOO


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that this rank has called.

    Attributes:
        ranks: The ranks of its group; none for those of the world's own.
        name: torch's name of it, such as ``"allreduce"``.
        dtype: Of the first tensor.
        size: Number of the first tensor's elements.
    """

    ranks: tuple[int, ...]
    name: str
    dtype: torch.dtype
    size: int


def register() -> list[Collective]:
    """Registers the backend; gives the list to which later groups of it add."""
    record: list[Collective] = []
    create = partial(_create, record)
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return record


def _create(record: list[Collective], options: Any, _: object) -> RecordingGroup:
    return RecordingGroup(record, options)


class RecordingGroup(dist.ProcessGroup):
    """Passes all collectives on to a group of gloo's."""

    def __init__(self, record: list[Collective], options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        place = options.store, options.group_rank, options.group_size
        self.inner = dist.ProcessGroup(*place)
        self.inner._set_default_backend(_GLOO)
        gloo = dist.ProcessGroupGloo(*place, options.timeout)
        self.inner._register_backend(torch.device("cpu"), _GLOO, gloo)
        self._record = record
        self._ranks = tuple(options.global_ranks_in_group)
        self._texts = {"name": "", "description": ""}

    def note(self, name: str, tensors: Any) -> None:
        """Records a collective."""
        while not isinstance(tensors, Tensor):
            tensors = tensors[0]
        self._record.append(Collective(self._ranks, name, tensors.dtype, tensors.numel()))

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._texts["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._texts["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._texts["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._texts["description"]


def _passed_on(name: str) -> Callable[..., Any]:
    def call(group: RecordingGroup, *arguments: Any, **keywords: Any) -> Any:
        group.note(name, arguments[0])
        return getattr(group.inner, name)(*arguments, **keywords)

    return call


for _name in (  # the last names of two versions of torch
    *("allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"),
    *("reduce_scatter_tensor_coalesced", "recv", "send"),
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecordingGroup, _name, _passed_on(_name))

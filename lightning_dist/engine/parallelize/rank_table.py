"""A table of all ranks: their hosts, their places on the mesh, and the parameters that they hold.

A launcher may number ranks in another way than the user expects. Then an axis that sends much
crosses hosts, and nothing but the time shows it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.mesh_shape import AXES, MeshShape
from lightning_dist.engine.common.table import draw_table
from lightning_dist.engine.tensors.dtensor import local_part

_NUM_SHOWN = 32


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank: where it is, its layers in words, and the elements and bytes of its parameters.

    Of a DTensor, these are those of its own shard.
    """

    rank: int
    host: str
    layers: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankTable:
    """A table of all ranks, one row for each; ``str`` draws it."""

    mesh: MeshShape
    rows: tuple[RankRow, ...]

    @property
    def num_hosts(self) -> int:
        """The number of hosts that have ranks."""
        return len({row.host for row in self.rows})

    def __str__(self) -> str:
        """Draws the table, with the axes that have more than one rank."""
        axes = [name for name in AXES if self.mesh.sizes[name] > 1]
        head: tuple[str, ...] = ("rank", "host", *axes, "layers", "parameters", "bytes")
        lines = [head]
        for row in self.rows[:_NUM_SHOWN]:
            places = [str(self.mesh.coordinates(row.rank)[name]) for name in axes]
            counts = (f"{row.num_parameters:,}", f"{row.num_bytes:,}")
            lines.append((str(row.rank), row.host, *places, row.layers, *counts))
        numbers = [column for column, name in enumerate(head) if name not in ("host", "layers")]
        drawn = draw_table(lines, right=numbers)
        hidden = len(self.rows) - _NUM_SHOWN
        return drawn if hidden <= 0 else f"{drawn}\n... and {hidden} more"


def gather_rank_table(
    module: nn.Module, mesh: MeshShape, layers: str, group: dist.ProcessGroup
) -> RankTable:
    """Returns the table of all ranks. Collective: every rank must call it.

    ``layers`` are this rank's, in words; the group is a gloo group of all ranks.
    """
    held = [local_part(parameter.detach()) for parameter in module.parameters()]
    own = RankRow(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        layers=layers,
        num_parameters=sum(part.numel() for part in held),
        num_bytes=sum(part.nbytes for part in held),
    )
    return RankTable(mesh, tuple(gather_objects(own, group)))

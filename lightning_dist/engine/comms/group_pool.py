"""Process groups that outlive a Trainer, for the next one to use.

A group costs descriptors and threads until it is destroyed, and a run cannot destroy its groups:
modules that stay parallel, and torch's caches of meshes, hold them. So a run takes groups from a
pool and returns them when it has ended well. A run within a run takes other groups. Groups of a
failed run are in an unknown state, and do not return.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_mesh import build_mesh, forget_meshes
from lightning_dist.engine.common.mesh_shape import MeshShape


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The key of interchangeable groups."""

    ranks: tuple[tuple[int, ...], ...]  # of all groups created together; each rank is in one
    backend: str
    purpose: str
    timeout: timedelta


class GroupPool:
    """The groups of one world that no run uses, and its meshes, which runs share."""

    def __init__(self) -> None:
        self._free: defaultdict[GroupKind, list[dist.ProcessGroup]] = defaultdict(list)
        self._meshes: dict[tuple[MeshShape, str, str], DeviceMesh] = {}

    def take(self, kind: GroupKind) -> dist.ProcessGroup:
        """Returns this rank's group of a kind. Collective: every rank must call it alike."""
        free = self._free[kind]
        if free:
            return free.pop()
        own: dist.ProcessGroup
        own, _ = dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in kind.ranks], timeout=kind.timeout, backend=kind.backend
        )
        return own

    def give_back(self, kind: GroupKind, group: dist.ProcessGroup) -> None:
        """Returns a group without unfinished operations of its own. Collective."""
        self._free[kind].append(group)

    def mesh(self, shape: MeshShape, device_type: str, backend: str) -> DeviceMesh:
        """Returns torch's mesh of all ranks. Collective: every rank must call it alike."""
        key = shape, device_type, backend
        if key not in self._meshes:
            self._meshes[key] = build_mesh(shape, device_type, backend)
        return self._meshes[key]

    def forget_mesh(self, mesh: DeviceMesh) -> None:
        """Drops a mesh whose groups are in an unknown state."""
        self._meshes = {key: other for key, other in self._meshes.items() if other is not mesh}


def pool_of_world() -> GroupPool:
    """Returns the pool of the current world."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _POOLS:
        forget_worlds()
        _POOLS[world] = GroupPool()
    return _POOLS[world]


def forget_worlds() -> None:
    """Drops the pools of all worlds; their meshes hold the worlds, so none would end by itself."""
    _POOLS.clear()
    forget_meshes()


# Trainers of a process know nothing of each other; they share the world only.
_POOLS: dict[dist.ProcessGroup, GroupPool] = {}

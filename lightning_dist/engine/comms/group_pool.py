"""Process groups that outlive a Trainer, for the next one to use.

A group costs descriptors and threads, and torch keeps it until it is destroyed. A script with many
Trainers must not make its groups anew for each of them. A run cannot destroy its groups either:
modules that stay parallel, and torch's caches of meshes, hold them.

So a run takes groups from a pool and gives them back when it has ended well. Runs within a run take
others. Groups of a run that has failed are in an unknown state, and do not come back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What two groups must have in common to take each other's place.

    Attributes:
        ranks: Of this group and of those that are made with it, each rank in one of them.
        purpose: Of a group of one's own.
        timeout: Of its operations.
    """

    ranks: tuple[tuple[int, ...], ...]
    purpose: str
    timeout: timedelta


class GroupPool:
    """The gloo groups of one world that no run uses, and its meshes, which runs share."""

    def __init__(self) -> None:
        self._free: defaultdict[GroupKind, list[dist.ProcessGroup]] = defaultdict(list)
        self._meshes: dict[tuple[MeshShape, str], DeviceMesh] = {}

    def take(self, kind: GroupKind) -> dist.ProcessGroup:
        """Returns this rank's group of a kind; all ranks of the world must call it alike.

        Args:
            kind: Of the group.
        """
        free = self._free[kind]
        if free:
            return free.pop()
        own: dist.ProcessGroup | None = None
        rank = dist.get_rank()
        for ranks in kind.ranks:
            group = dist.new_group(list(ranks), backend="gloo", timeout=kind.timeout)
            if rank in ranks:
                own = group
        assert own is not None
        return own

    def give_back(self, kind: GroupKind, group: dist.ProcessGroup) -> None:
        """Lets other runs take a group; all ranks of the world must call it alike.

        Args:
            kind: Of the group.
            group: Nothing is under way in it but what all its ranks have begun.
        """
        self._free[kind].append(group)

    def mesh(self, shape: MeshShape, device_type: str) -> DeviceMesh:
        """Returns torch's mesh of all ranks; all of them must call it alike.

        Args:
            shape: The sizes.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        key = shape, device_type
        if key not in self._meshes:
            self._meshes[key] = build_mesh(shape, device_type)
        return self._meshes[key]

    def forget_mesh(self, mesh: DeviceMesh) -> None:
        """Drops a mesh whose groups are in an unknown state.

        Args:
            mesh: From :meth:`mesh`.
        """
        self._meshes = {key: other for key, other in self._meshes.items() if other is not mesh}


def pool_of_world() -> GroupPool:
    """Returns the pool of the processes that have met; it ends with their default group."""
    world = dist.group.WORLD
    assert world is not None
    return _POOLS.setdefault(world, GroupPool())


# Trainers of a process know nothing of each other; what they share is the world.
_POOLS: WeakKeyDictionary[dist.ProcessGroup, GroupPool] = WeakKeyDictionary()

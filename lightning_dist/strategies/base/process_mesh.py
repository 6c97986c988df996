"""Processes on a mesh, under Lightning's contract: the part of a strategy that trains nothing.

It has the launcher, the process group, and the ranks that share an axis or read the same data.
Reductions are over the data axes alone: a value that is the same on other axes must not count
several times. A subclass chooses the sizes of its mesh (:meth:`ProcessMesh.mesh_shape`).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_dist.engine.common.device_group import (
    DeviceGroup,
    check_backend,
    gather_tensor,
    reduce_tensor,
)
from lightning_dist.engine.common.mesh_shape import DATA_AXES, MeshShape
from lightning_dist.engine.common.names import check_positive
from lightning_dist.engine.comms import interface
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.comms.group_pool import GroupKind, pool_of_world
from lightning_dist.engine.comms.meeting import Meeting, launcher_serves, meet
from lightning_dist.engine.tensors.dtensor import whole
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.ending.brief_errors import brief_mistakes
from lightning_dist.strategies.base.launcher import ScriptLauncher


class ProcessMesh(ParallelStrategy):
    """Base class; see the module's docstring.

    The arguments are those of :class:`.RunArguments`.

    Attributes:
        num_nodes: Number of hosts of the run; set by Lightning.
        is_distributed: Whether there may be other ranks, as Lightning asks.
        timeout_seconds: How long a rank waits for another.
    """

    is_distributed = True

    def __init__(
        self, process_group_backend: str | None = None, timeout_s: float = 1800.0, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        check_positive("timeout_s", timeout_s)
        self.num_nodes = 1
        self._backend = process_group_backend
        self.timeout_seconds = timeout_s
        self._mesh: MeshShape | None = None
        self._device_mesh: DeviceMesh | None = None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._taken: list[tuple[GroupKind, dist.ProcessGroup]] = []
        self._has_begun = False
        self._shown_rank: int | None = None

    # --- the mesh ----------------------------------------------------------------------------

    @abstractmethod
    def mesh_shape(self, world_size: int) -> MeshShape:
        """Returns the mesh; raises ``ValueError`` if the sizes do not fit the world size."""

    @property
    def module(self) -> pl.LightningModule:
        """The user's module."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def mesh(self) -> MeshShape:
        """The sizes of the mesh."""
        assert self._mesh is not None, "the mesh is known once the Trainer has been built"
        return self._mesh

    @property
    def num_processes(self) -> int:
        """Number of processes on this host."""
        return len(self.parallel_devices or [])

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        first = self.parallel_devices[0]
        # `devices="auto"` is one CPU, however many processes a launcher has started.
        return first if first.type == "cpu" else self.parallel_devices[self.local_rank]

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._shown_rank is None else self._shown_rank

    @contextmanager
    def shown_as(self, rank: int) -> Iterator[None]:
        """Returns a context manager in which users' code sees another rank than this one's.

        ``self.global_rank``, ``trainer.is_global_zero`` and ``rank_zero_only`` go by it.
        """
        before, self._shown_rank = self._shown_rank, rank
        lightning_internals.set_rank_of_rank_zero_functions(rank)
        try:
            yield
        finally:
            self._shown_rank = before
            lightning_internals.set_rank_of_rank_zero_functions(self.global_rank)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {
            "num_replicas": self.mesh.data_size,
            "rank": self.mesh.data_index(self.global_rank),
        }

    def set_world_ranks(self) -> None:
        """Sets the ranks of the cluster environment, and checks the mesh; called by Lightning."""
        asked = self.num_nodes * self.num_processes
        environment = self.cluster_environment
        if environment is not None:
            # An environment whose launcher has started the processes, such as Ray's, knows better.
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(asked)
            asked = environment.world_size()
        lightning_internals.set_rank_of_rank_zero_functions(self.global_rank)
        with brief_mistakes():
            if dist.is_initialized() and dist.get_world_size() != asked:
                raise ValueError(
                    f"This Trainer asks for a world size of {asked}, but the script runs in"
                    f" {dist.get_world_size()} processes, which an earlier Trainer has started."
                    " Give all Trainers of a script the same `devices` and `num_nodes`, or each a"
                    " script of its own."
                )
            if self._backend is not None:
                check_backend(self._backend, self.root_device.type)
            self._mesh = self.mesh_shape(asked)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    # --- processes ---------------------------------------------------------------------------

    def _init_process_group(self) -> None:
        assert self.cluster_environment is not None
        self.set_world_ranks()
        if dist.is_initialized():
            return
        address, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        os.environ["MASTER_ADDR"] = address
        os.environ["MASTER_PORT"] = str(port)
        place = address, port, self.global_rank, self.world_size
        per_host = self.num_processes
        if per_host * self.num_nodes != self.world_size:
            per_host = 0  # only the launcher knows
        store = meet(Meeting(*place, per_host, self.timeout_seconds, serves=not launcher_serves()))
        # No `device_id`, which would bind the device. Then torch would split the world's NCCL
        # communicator for each later group, gloo's too: a collective of all ranks each time, even
        # for two. Unbound, a group's own ranks form its communicator when they first use it.
        if self.num_nodes > 1 and (name := interface.choose_interface(address)) is not None:
            os.environ.setdefault(interface.VARIABLE, name)
        try:
            dist.init_process_group(
                self.device_backend,
                rank=self.global_rank,
                world_size=self.world_size,
                store=store,
                timeout=timedelta(seconds=self.timeout_seconds),
            )
        except RuntimeError as error:
            if self.num_nodes > 1 and not isinstance(error, dist.DistError):
                error.add_note(interface.describe_meeting())
            raise

    @property
    def device_backend(self) -> str:
        """The backend of groups for tensors of this rank's device."""
        return self._backend or dist.get_default_backend_for_device(self.root_device)

    def group(
        self, *axes: str, purpose: str = "", timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """Returns this rank's gloo group along some mesh axes, for control messages.

        It takes CPU tensors. Collective: every rank must call it.

        Args:
            axes: Names of mesh axes; all of them for a group of all ranks.
            purpose: Name of a separate group, for collectives in another order on each rank.
            timeout: Timeout of the operations in a separate group; None takes the run's.
        """
        return self._group("gloo", axes, purpose, timeout)

    def device_group(self, *axes: str, purpose: str = "") -> DeviceGroup:
        """Returns this rank's group along some mesh axes, for tensors of its device.

        Its backend is :attr:`device_backend`; if that is gloo, it is the group of :meth:`group`.
        Collective: every rank must call it.
        """
        return DeviceGroup(self._group(self.device_backend, axes, purpose), self.root_device)

    def _group(
        self, backend: str, axes: tuple[str, ...], purpose: str, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        # An axis of size 1 adds no rank: the stages of a plain pipeline are the world.
        key = (backend, *(axis for axis in axes if self.mesh.sizes[axis] > 1), purpose)
        if key not in self._groups:
            ranks = tuple(tuple(group) for group in self.mesh.groups(*axes))
            timeout = timeout or timedelta(seconds=self.timeout_seconds)
            kind, pool = GroupKind(ranks, backend, purpose, timeout), pool_of_world()
            self._groups[key] = group = pool.take(kind)
            if backend != "gloo" and len(ranks[0]) > 1:
                # Where all ranks are: a rank whose first collective forms the communicator would
                # wait there for the others, even if it means to go on.
                dist.all_reduce(torch.zeros(1, device=self.root_device), group=group)
            if self._has_begun:
                self._taken.append((kind, group))
            else:  # between two runs no other run uses it
                pool.give_back(kind, group)
        return self._groups[key]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves process groups, which belong to this process, out of copies of a Trainer."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_groups": {}, "_taken": [], "_device_mesh": None}

    def begin_run(self) -> None:
        """Begins a run, which takes groups anew. Collective: every rank must call it."""
        self._groups.clear()
        self._taken.clear()
        self._has_begun = True

    def end_run(self, *, failed: bool) -> None:
        """Releases the groups to other Trainers; this strategy can use them if all ranks do.

        Collective: every rank must call it. After a failure the groups are in an unknown state.
        """
        self._has_begun = False
        if failed:
            mesh = [] if self._device_mesh is None else self._device_mesh.get_all_groups()
            never_destroy([*self._groups.values(), *mesh, dist.group.WORLD])
            # A single rank leaves no other rank behind in the middle of a collective.
            if self._device_mesh is not None and self.world_size > 1:
                pool_of_world().forget_mesh(self._device_mesh)
            return
        for kind, group in self._taken:
            pool_of_world().give_back(kind, group)

    @property
    def world_group(self) -> dist.ProcessGroup:
        """The gloo group of all ranks."""
        return self.group(*self.mesh.sizes)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The gloo group of ranks that hold the same part of the model and read other data."""
        return self.group(*DATA_AXES)

    @property
    def data_device_group(self) -> DeviceGroup:
        """The ranks of :attr:`data_group`, as a group for tensors of this rank's device."""
        return self.device_group(*DATA_AXES)

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes along which each step's gradients are averaged."""
        return DATA_AXES

    @property
    def update_axes(self) -> tuple[str, ...]:
        """The axes along which the gradients of the next update are averaged."""
        return self.gradient_axes

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same layers."""
        return tuple(self.mesh.sizes) if self.mesh.pp == 1 else (*DATA_AXES, "tp")

    @property
    def mesh_of_ranks(self) -> DeviceMesh:
        """Torch's mesh of all ranks. Collective: every rank must read it."""
        if self._device_mesh is None:
            self._device_mesh = pool_of_world().mesh(
                self.mesh, self.root_device.type, self.device_backend
            )
        return self._device_mesh

    # --- collectives -------------------------------------------------------------------------

    @override
    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Tensor | Any:
        """Reduces a tensor over the data replicas; the other axes hold the same value."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        tensor = whole(tensor)  # a hook may have computed it of shards, as a gradient's norm
        return reduce_tensor(tensor, group or self.reduction_group(tensor), reduce_op)

    def reduction_group(self, tensor: Tensor) -> dist.ProcessGroup:
        """Returns the group over which a value is combined where none is named."""
        # A GPU's values stay there, so that logging does not wait for the GPU.
        is_here = tensor.device.type == "cpu"
        return self.data_group if is_here else self.data_device_group.group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.check_peers()
        if not self.is_running:
            return decision
        votes = torch.tensor([int(decision)], dtype=torch.int32)
        op = ReduceOp.MIN if all else ReduceOp.MAX
        dist.all_reduce(votes, op=op, group=self.world_group)
        return bool(votes.item())

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        if not dist.is_initialized():
            return tensor
        # `LightningModule.all_gather` names the group of all ranks where the user names none.
        if group is None or group is dist.group.WORLD:
            if dist.get_world_size(self.data_group) == 1:  # one replica sees what one device does
                return tensor
            group = self.reduction_group(tensor)
        return gather_tensor(tensor, group, sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        self.check_peers()
        if self.is_running:
            dist.barrier(self.world_group)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.check_peers()
        if not self.is_running:
            return obj
        objects = [obj]
        try:
            dist.broadcast_object_list(objects, src, group=self.world_group)
        except RuntimeError as error:  # of gloo, in words of its own
            error.add_note(
                "Another rank has ended, and says why; or it has not asked for a value for which"
                " all ranks must ask, as `trainer.log_dir`. In a step behind a pipelined model only"
                " the last stage does: read it in `on_fit_start`, and keep it."
            )
            raise
        return objects[0]

    def check_peers(self) -> None:
        """Raises if another rank has failed; called before this rank waits for all others."""

    @property
    def is_running(self) -> bool:
        """Whether other ranks can be expected to take part in a collective."""
        return dist.is_initialized()

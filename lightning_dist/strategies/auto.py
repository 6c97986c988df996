"""A mesh that is chosen when training begins, by measuring.

The ranks meet as data replicas. Before the model is placed, its layers are timed on the first
batch, and the links between the ranks. Rank 0 searches all layouts, and all ranks take the best.
"""

from __future__ import annotations

import gc
import os
import socket
from collections import Counter
from dataclasses import replace
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.mesh_shape import DATA_AXES, MeshShape
from lightning_dist.engine.common.names import check_count, check_positive
from lightning_dist.engine.comms.group_pool import pool_of_world
from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import ModelCosts, averaged
from lightning_dist.engine.planning.search.plan import Ranking
from lightning_dist.engine.planning.search.search import Request, schedule_names, search
from lightning_dist.engine.planning.search.tried import corrected, next_to_try
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.strategies.base import lightning_loaders
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.base.model_checks import check_dense_gradients
from lightning_dist.strategies.mesh import MeshStrategy, mesh_arguments
from lightning_dist.strategies.mesh_runtime.first_call import share_first_batch
from lightning_dist.strategies.mesh_runtime.kept_sharding import forget_replicas
from lightning_dist.strategies.mesh_runtime.measuring.costs import (
    Measurement,
    memory_of,
    parameters_per_layer,
    refuse_manual,
    tensor_sizes_of,
)
from lightning_dist.strategies.mesh_runtime.measuring.machine import (
    measure_alone,
    measure_axis,
    measure_stages,
    measure_tensor_layers,
    measure_updates,
)
from lightning_dist.strategies.mesh_runtime.measuring.rehearsal import Rehearsal

_KEY = "lightning_dist_plan"
_GPU_OVERLAP = 0.9


class AutoStrategy(MeshStrategy):
    """Chooses the sizes of a mesh when a fit begins, and trains on it.

    It measures the module on the first batch and the links, for some seconds, and prints the best
    plans. As everywhere in Lightning, the loader's batch is that of one data replica: layouts are
    compared by the time of a sample, and one with fewer replicas has a smaller global batch. Each
    rank builds the whole module once.

    The plan goes to the loggers' hyperparameters, and into checkpoints as ``lightning_dist_plan``.
    A later fit of this strategy keeps it.

    Args:
        replicas: Number of data replicas, to keep the global batch; None allows any.
        memory_gib: GiB that a rank may use; None takes the GPU's memory, or a share of the host's.
        schedules: Schedules that are allowed; None allows all synchronous ones.
        recompute: Whether activations may be computed again.
        states_per_parameter: Tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 1
            for momentum, 0 for plain SGD.
        num_plans: Number of plans to compare and print.
        tensor: As for :class:`MeshStrategy`.
        find_unused_parameters: As for :class:`FSDPStrategy`.
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is out of range, or is one that the plan decides.
    """

    def __init__(
        self,
        replicas: int | None = None,
        memory_gib: float | None = None,
        schedules: list[str] | None = None,
        recompute: bool = True,
        states_per_parameter: int = 2,
        num_plans: int = 10,
        tensor: TensorConfig = TensorConfig(),  # noqa: B008  (it is frozen)
        find_unused_parameters: bool = False,
        **arguments: Unpack[RunArguments],
    ) -> None:
        if planned := sorted({"pipeline", "shard", *MeshShape().sizes} & arguments.keys()):
            raise ValueError(f"The plan decides on {planned}. Leave them out, or use MeshStrategy.")
        if replicas is not None:
            check_count("replicas", replicas)
        if memory_gib is not None:
            check_positive("memory_gib", memory_gib)
        check_count("states_per_parameter", states_per_parameter, at_least=0)
        super().__init__(dp_shard=1, tensor=tensor, meta_init=False, **arguments)
        self._memory_gib = memory_gib
        self._finds_unused = find_unused_parameters
        # The first batch tells how large it is.
        self._request = Request(
            batch_size=1, recompute=recompute, replicas=replicas, num_plans=num_plans
        )
        if schedules is not None:
            self._request = replace(self._request, schedules=schedule_names(schedules))
        self._states = states_per_parameter
        self._ranking: Ranking | None = None

    @property
    def ranking(self) -> Ranking | None:
        """The plans that were compared, of which the first runs; None before the first fit."""
        return self._ranking

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        if self._ranking is None:
            return MeshShape(dp_replicate=world_size)
        return super().mesh_shape(world_size)

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        if self.is_fitting and self._ranking is None:
            if self.world_size > 1:
                check_dense_gradients(self.module, "the plans that are compared")
            forget_replicas(self.module)
            self._sharded = None
            with random_state_kept(self.root_device):
                ranking = self._search(trainer)
            rank_zero_info(f"{ranking.table().title}\n{ranking.table()}")
            self._adopt(ranking)
            for logger in trainer.loggers:
                logger.log_hyperparams({_KEY: ranking.best.to_dict()})
        super().check_run(trainer)

    @override
    def extra_state(self) -> dict[str, Any]:
        state = super().extra_state()
        ranking = self._ranking
        return state if ranking is None else state | {_KEY: ranking.best.to_dict()}

    def _adopt(self, ranking: Ranking) -> None:
        """Puts the ranks on the mesh of the best plan. Collective: every rank must call it."""
        self._ranking = ranking
        layout = ranking.best.layout
        arguments = mesh_arguments(layout, find_unused_parameters=self._finds_unused)
        self._pipeline_config, self._shard_config = arguments["pipeline"], arguments["shard"]
        self._sizes |= layout.mesh.sizes
        self._mesh = self.mesh_shape(self.world_size)
        self._groups.clear()
        self._device_mesh = None
        self.join_mesh()

    def _search(self, trainer: pl.Trainer) -> Ranking:
        refuse_manual(self.module)
        purpose = "AutoStrategy measures the module on the first batch"
        read = share_first_batch(trainer, self._begun, purpose)
        if read is None:
            raise ValueError(f"{purpose}, and this run has none. Use MeshStrategy.")
        machine = self._machine()
        if self.world_size > 1:
            # Ahead of the layers, which are faster where large tensors have been freed before, as
            # in a run.
            machine = self._with_links(machine, parameters_per_layer(self.module))
        batch = lightning_loaders.to_step(trainer, read[0], self.root_device)
        costs = self._costs(batch, machine)
        found: Ranking | str = ""
        if trainer.is_global_zero:
            batch_size = costs.batches[-1].num_samples
            try:
                found = search(costs, machine, replace(self._request, batch_size=batch_size))
            except ValueError as error:
                found = str(error)
        found = self.broadcast(found)
        if isinstance(found, str):
            raise ValueError(found)
        if self.world_size == 1:
            return found
        return corrected(found, self._rehearse(found, batch), machine)

    def _rehearse(self, ranking: Ranking, batch: Any) -> dict[Layout, float | None]:
        """Runs steps of some plans. Collective: every rank must call it.

        Returns:
            By layout, the time of a step over what the plan says; None if the module can't have it.
        """
        rehearsal = Rehearsal(
            self.module,
            batch,
            self.precision_plugin,
            self.root_device,
            self.device_backend,
            self.global_rank,
            self._states,
            self.timeout_seconds,
        )
        ratios: dict[Layout, float | None] = {}
        while (plan := next_to_try(ranking, ratios)) is not None:
            mesh = plan.layout.mesh
            planned = MeshStrategy.from_plan(
                plan, find_unused_parameters=self._finds_unused, tensor=self._tensor_config
            )
            planned.precision_plugin = self.precision_plugin
            ranks = pool_of_world().mesh(mesh, self.root_device.type, self.device_backend)
            try:
                taken = rehearsal.seconds(mesh, ranks, planned.parallelism(mesh))
            except ValueError:  # alike on all ranks, as each says it
                ratios[plan.layout] = None
            else:
                ratios[plan.layout] = taken / plan.estimate.seconds_with_batch
            gc.collect()  # copies of the module are in cycles, and would fill the device
        return ratios

    def _costs(self, batch: Any, machine: Machine) -> ModelCosts:
        """Measures the module on as many ranks of each host as compute at the same time.

        Collective: every rank must call it.

        Returns:
            The mean costs of these ranks, and what they wait for the slowest in each layer.
        """
        measurement = Measurement(
            self.root_device,
            self.precision_plugin.train_step_context,
            tensor_sizes_of(machine),
            self._states,
        )
        costs = None
        self.module.to(self.root_device)
        self.precision_plugin.convert_module(self.module)
        self.precision_plugin.connect(self.module, [], [])
        self.barrier("measure")
        if machine.processors is None or self.local_rank < max(1, int(machine.processors)):
            costs = measurement.costs(self.module, batch)
        self.precision_plugin.teardown()
        self.module.to("cpu")
        gc.collect()  # as below
        mean = averaged([each for each in gather_objects(costs, self.world_group) if each])
        return mean if self._read == "first" else replace(mean, sample_bytes=0.0)

    def _machine(self) -> Machine:
        """Returns the machine of this run. Collective: every rank must call it."""
        hosts = Counter(gather_objects(socket.gethostname(), self.world_group))
        per_host = self.world_size // len(hosts)
        if {*hosts.values()} != {per_host}:
            raise ValueError(
                f"AutoStrategy plans for hosts with as many ranks each, and these have"
                f" {dict(hosts)}. Use MeshStrategy."
            )
        is_cpu = self.root_device.type == "cpu"
        memory = self._memory_gib
        return Machine(
            self.world_size,
            memory_of(self.root_device, per_host) if memory is None else memory * 2**30,
            num_hosts=len(hosts),
            processors=len(os.sched_getaffinity(0)) / torch.get_num_threads() if is_cpu else None,
            overlap=0.0 if is_cpu else _GPU_OVERLAP,
        )

    def _with_links(self, machine: Machine, parameters_per_unit: int) -> Machine:
        """Measures the links of a machine. Collective: every rank must call it."""
        device, per_host, hosts = self.root_device, machine.ranks_per_host, machine.num_hosts

        def mesh(**sizes: int) -> DeviceMesh:
            shape = MeshShape(**sizes)
            return pool_of_world().mesh(shape, device.type, self.device_backend)

        replicas = mesh(dp_replicate=self.world_size)
        machine = replace(
            machine,
            alone=measure_alone(replicas["dp_shard"], device, parameters_per_unit),
            update_seconds=measure_updates(replicas[DATA_AXES], device, self._states),
        )
        if device.type == "cpu":  # GPUs compute while their host prepares
            size = next(n for n in range(2, self.world_size + 1) if self.world_size % n == 0)
            shape = MeshShape(pp=size, dp_replicate=self.world_size // size)
            taken = measure_stages(shape, self.global_rank, self.timeout_seconds)
            machine = replace(machine, stage_seconds=taken)
        if hosts > 1:
            across = mesh(dp_replicate=hosts, dp_shard=per_host)["dp_replicate"]
            # All ranks of a host send at the same time.
            between = measure_axis(across, device, parameters_per_unit)
            machine = replace(machine, between=between.times(per_host))
        if per_host > 1:
            inside = mesh(dp_replicate=hosts, tp=per_host)["tp"]
            machine = replace(
                machine,
                within=measure_axis(inside, device, parameters_per_unit),
                tensor_seconds=measure_tensor_layers(inside, device),
            )
        return machine

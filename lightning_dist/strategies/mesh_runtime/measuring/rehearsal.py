"""Train a few steps on a layout, on a copy of the module, to know what a step takes.

Costs of layers and links predict a step within a fifth. What is missing is in no formula: tensors
that are in a cache or not, wrappers of the model's own around its layers, the moments at which
ranks wait for each other. So the best layouts run before one is chosen.

As in a dry run, the copy is made parallel by :func:`.parallelize`, and runs in the classes that
train. It has the module's values, but no callbacks, and no loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.common.device_mesh import axis
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.channel import PeerLostError
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.data_parallel.ddp_options import GradientExchange
from lightning_dist.engine.data_parallel.replicas import average_gradients
from lightning_dist.engine.parallelize.composition import ParallelModule, parallelize
from lightning_dist.engine.parallelize.mixed_tensors import split_groups_by_mesh
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.pipeline.microbatch import Loss
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.profiling.links import time_on_slowest_rank
from lightning_dist.engine.sharding.deferred_init.api import named_tensors
from lightning_dist.engine.sharding.fully_shard import fill
from lightning_dist.engine.splitting.ties import tie_again
from lightning_dist.engine.tensors.skeleton import skeleton_of
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin, half_precision_of
from lightning_dist.strategies.mesh_runtime.first_call import ahead_of_run, step_arguments
from lightning_dist.strategies.mesh_runtime.measuring.updates import dense, optimizer_of
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipelining.session import stage_options

_SECONDS_PER_ROUND = 0.5


@dataclass(frozen=True)
class Rehearsal:
    """What all layouts have in common.

    Attributes:
        module: The whole module, which is not changed.
        batch: A loader's batch for one data replica.
        precision: Creates the context manager that a step runs in.
        backend: Backend of groups for tensors of the device.
        states_per_parameter: As for :func:`.optimizer_of`.
    """

    module: pl.LightningModule
    batch: Any
    precision: Precision
    device: torch.device
    backend: str
    rank: int
    states_per_parameter: int
    timeout_seconds: float

    def seconds(self, mesh: MeshShape, ranks: DeviceMesh, how: Parallelism) -> float:
        """Returns a step's time, alike on all ranks. Collective: every rank must call it.

        Raises:
            ValueError: The module cannot be made parallel so, or its step fails on some stage.
        """
        own = skeleton_of(self.module)
        own.trainer = self.module.trainer
        own.train()
        half = half_precision_of(self.precision)
        if half is None:
            return self._seconds_of_copy(own, mesh, ranks, how)
        plugin = HalfPrecisionPlugin(half.half)  # which leaves no step out
        plugin.convert_module(own)
        try:
            return replace(self, precision=plugin)._seconds_of_copy(own, mesh, ranks, how)
        finally:
            plugin.teardown()

    def _seconds_of_copy(
        self, own: pl.LightningModule, mesh: MeshShape, ranks: DeviceMesh, how: Parallelism
    ) -> float:
        composed = parallelize(own, ranks, how)
        values = named_tensors(self.module, every_name=True)

        def value_of(name: str) -> Tensor:
            return values[name].to(self.device, copy=True)

        fill(own, named_tensors(own), value_of, self.device)
        if composed.split is not None:
            tie_again(composed.split.layers, composed.split.ties)
        half = half_precision_of(self.precision)
        if half is not None:
            half.connect(own, [], [])
            if composed.shards:
                half.leave_to_shards()
        with ahead_of_run(own):
            if composed.split is None:
                return self._seconds(self._whole(composed, ranks, how))
            return self._staged(composed, mesh, how, ranks)

    def _seconds(self, step: Callable[[], None]) -> float:
        step()  # makes the optimizer's states
        return time_on_slowest_rank(step, self.device, _SECONDS_PER_ROUND)

    def _optimizer(self, composed: ParallelModule) -> Optimizer | None:
        own = [p for p in composed.module.parameters() if p.requires_grad and not p.is_meta]
        return optimizer_of(own, self.states_per_parameter) if own else None

    def _whole(
        self, composed: ParallelModule, ranks: DeviceMesh, how: Parallelism
    ) -> Callable[[], None]:
        module, optimizer = ShardedModule(composed, None), self._optimizer(composed)
        own = module.module
        arguments = step_arguments(own.training_step, self.batch, 1)
        context = self.precision.train_step_context

        def step() -> None:
            loss = Loss.of(module.train(own.training_step, context, *arguments)).value
            _forget_gradients(optimizer)
            module.backward(loss, partial(self._differentiate, loss, own), accumulating=False)
            module.add_gradients()
            _update(optimizer)

        replicas = None if composed.shards else axis(ranks, "dp_replicate")
        if replicas is None:
            return step
        finds_unused = how.shard is not None and how.shard.find_unused_parameters
        exchange = GradientExchange(find_unused_parameters=finds_unused)
        ddp = exchange.wrap(own, replicas.get_group())

        def step_of_replica() -> None:
            with context():
                loss = Loss.of(ddp(own.training_step, *arguments)).value
            _forget_gradients(optimizer)
            self._differentiate(loss, own)
            _update(optimizer)

        return step_of_replica

    def _differentiate(self, loss: Tensor, own: pl.LightningModule) -> Tensor:
        self.precision.backward(loss, own, None)
        return loss

    def _staged(
        self, composed: ParallelModule, mesh: MeshShape, how: Parallelism, ranks: DeviceMesh
    ) -> float:
        split, config = composed.split, how.pipeline
        assert split is not None
        assert config is not None
        staged, optimizer = StagedModule(composed, None, config), self._optimizer(composed)
        shape = config.shape(mesh, self.rank, split.layers_per_stage)
        channels = connect(
            mesh.groups("pp"),
            self.device,
            self.timeout_seconds,
            rank_of_stage=shape.rank_of_stage,
            p2p_backend=config.p2p_backend(self.backend, self.device),
        )
        half = half_precision_of(self.precision)
        options = stage_options(split.layers, staged.wrapped, half, self.device)
        train = staged.bare_step(self.precision.train_step_context)
        replicas = axis(ranks, "dp_replicate") if staged.is_whole else None

        def complete() -> None:
            staged.add_gradients()
            if replicas is not None:
                group = DeviceGroup(replicas.get_group(), self.device)
                average_gradients(staged.module.parameters(), group)

        failed = True
        try:
            tied = TiedSums(split.ties, split.rank_of_stage, shape.rank, channels.ties)
            pipeline = Pipeline(split.layers, shape, channels.links, options, shared=tied.names)

            def step() -> None:
                pipeline.train_batch(self.batch, train)
                _forget_gradients(optimizer)
                pipeline.install_gradients(complete)
                with pipeline.updating():
                    _update(optimizer)

            taken = self._seconds(step)
            pipeline.detach()
            failed = False
        except (PeerLostError, TimeoutError) as error:  # it has closed its channels, as below
            raise ValueError(f"Another stage has failed: {error}") from error
        finally:
            channels.close(failed=failed)
        return taken


def _forget_gradients(optimizer: Optimizer | None) -> None:
    """Frees the last step's gradients where Lightning does, behind the next step's forward.

    When memory is freed decides which of it is there again, and which the host has to give anew.
    """
    if optimizer is not None:
        optimizer.zero_grad()


def _update(optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad = dense(parameter.grad)
        with split_groups_by_mesh(optimizer):
            optimizer.step()

"""Run a training step on each rank of a mesh that does not exist, and count.

The user's module is made parallel by :func:`.parallelize`, and its step is run by the classes that
train. Collectives are counted where torch dispatches them. Only the layer underneath differs: a
process group without other processes, tensors without values, and channels to stages that are tried
before and after. One rank of each place in a pipeline is tried, the first along all other axes. If
a sharded dimension is not divisible, that place holds the most.

*Counted:* a step of one batch and its backward, the gradients that remain, and the bytes that the
rank sends meanwhile. *Not counted:* activations and other temporary tensors; buffers; the
optimizer's own scalars; clipping, logging with ``sync_dist`` and metrics; synchronised BatchNorm;
the few bytes by which ranks agree on how a run goes on, and the header of a message between stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.common.device_mesh import axis, build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.links import ChannelEnds
from lightning_dist.engine.data_parallel.replicas import average, average_gradients
from lightning_dist.engine.parallelize.composition import ParallelModule, parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.pipeline.microbatch import Loss
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.tied_gradients import TiedSums
from lightning_dist.engine.planning.dry_run_report import DryRunSummary, RankKind, collapse
from lightning_dist.engine.planning.traffic import MessageKind, Traffic, TrafficLedger
from lightning_dist.engine.profiling.meters.traffic_counter import TrafficCounter
from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from lightning_dist.engine.sharding.fully_shard import fill
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.module_tree import map_other_tensors
from lightning_dist.engine.tensors.rng import random_state_kept
from lightning_dist.engine.tensors.skeleton import skeleton_of
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.mesh_runtime.checks import check_automatic, check_shardable
from lightning_dist.strategies.mesh_runtime.dry.channel import Sent, dry_links
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank, without_values
from lightning_dist.strategies.mesh_runtime.first_call import step_arguments
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule
from lightning_dist.strategies.mesh_runtime.staged_module import StagedModule
from lightning_dist.strategies.pipelining.session import stage_options

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """The mesh, the parallelism and the batch to try.

    Attributes:
        asked: How the module is made parallel.
        precision: Converts the module, and creates the context manager that a step runs in.
        batch: A loader's batch for one rank, of which only shapes and dtypes are used.
        optimizer_states_per_parameter: Tensors of a parameter's size that the optimizer keeps.
        averaged_axes: Axes along which whole gradients are averaged; none where FSDP does it.
    """

    mesh: MeshShape
    asked: Parallelism
    precision: Precision
    batch: Any
    optimizer_states_per_parameter: int
    averaged_axes: tuple[str, ...] = ()

    def run(self, module: pl.LightningModule) -> DryRunSummary:
        """Tries each place in a pipeline; the user's module is not changed.

        Raises:
            ValueError: The module cannot be made parallel so, or its step needs values.
        """
        with random_state_kept(_CPU):
            whole = self._configured(skeleton_of(module))
            in_order = self._homes == tuple(range(self.mesh.pp))
            known = {} if in_order else self._learned(whole)
            kinds = self._try_each(whole, known)
        return DryRunSummary(self.mesh, collapse(kinds), self._homes)

    @property
    def _homes(self) -> tuple[int, ...]:
        """The rank of each stage, in the pipeline."""
        config = self.asked.pipeline
        return (0,) if config is None else config.rank_of_stage(self.mesh.pp)

    def _learned(self, whole: pl.LightningModule) -> dict[int, Sent]:
        """Returns the messages that each stage sends, found with one rank per stage."""
        known: dict[int, Sent] = {}
        config = self.asked.pipeline
        assert config is not None
        one_each = replace(
            config,
            schedule="gpipe",
            stages_per_rank="auto",
            num_microbatches=config.training_microbatches(self.mesh.pp),
        )
        replace(
            self,
            mesh=replace(self.mesh, pp=len(self._homes)),
            asked=replace(self.asked, pipeline=one_each),
        )._try_each(whole, known)
        return known

    def _try_each(self, whole: pl.LightningModule, known: dict[int, Sent]) -> list[RankKind]:
        """Tries the ranks of a pipeline, and adds the messages that they send to ``known``."""
        return [self._try(place, skeleton_of(whole), known) for place in range(self.mesh.pp)]

    def _configured(self, own: pl.LightningModule) -> pl.LightningModule:
        own.log = lambda *_, **__: None  # type: ignore[method-assign]  # it wants a Trainer
        with deferred_init(only_shapes=True):
            own.configure_model()
        check_shardable(own, is_manual=False)
        check_automatic(own)
        self.precision.convert_module(own)
        own.train()
        return own

    def _try(self, place: int, module: pl.LightningModule, known: dict[int, Sent]) -> RankKind:
        rank = place * self.mesh.world_size // self.mesh.pp  # the first of its stages
        # Compiled or not, a step holds and sends the same.
        assert self.asked.shard is not None
        asked = replace(self.asked, shard=replace(self.asked.shard, compile=False))
        ledger = TrafficLedger()
        with fake_rank(rank, self.mesh.world_size):
            ranks = build_mesh(self.mesh, _CPU.type)
            composed = parallelize(module, ranks, asked)
            step = DryStep(run=self, composed=composed, rank=rank, ranks=ranks, ledger=ledger)
            with without_values(TrafficCounter(ledger, self.mesh)):
                tensors = named_tensors(module)  # from meta to the CPU, without memory either
                fill(module, tensors, lambda name: _without_values(tensors[name]), _CPU)
                map_other_tensors(module, lambda t: _without_values(t) if t.is_meta else t)
                known |= step.train(map_tensors(_without_values, self.batch), known)
                return self._kind_of(place, module, ledger.traffic)

    def _kind_of(
        self, place: int, module: pl.LightningModule, traffic: tuple[Traffic, ...]
    ) -> RankKind:
        parameters = list(module.parameters())
        trained_bytes = _bytes_of(p for p in parameters if p.requires_grad)
        return RankKind(
            stages=tuple(stage for stage, home in enumerate(self._homes) if home == place),
            num_ranks=self.mesh.world_size // self.mesh.pp,
            parameter_bytes=_bytes_of(parameters),
            gradient_bytes=_bytes_of(p.grad for p in parameters if p.grad is not None),
            optimizer_state_bytes=self.optimizer_states_per_parameter * trained_bytes,
            traffic=traffic,
        )


@dataclass(frozen=True)
class DryStep:
    """One training step of a rank, without the Trainer's work around it: hooks, logging, update."""

    run: DryRun
    composed: ParallelModule
    rank: int
    ranks: DeviceMesh
    ledger: TrafficLedger

    def train(self, batch: Any, known: Mapping[int, Sent]) -> Mapping[int, Sent]:
        """Runs forward and backward on a loader's batch.

        Returns:
            The messages that this rank's stages send to the next stages, by stage.
        """
        try:
            if self.composed.split is None:
                self._run_whole(batch)
                return {}
            return self._run_stages(batch, known)
        except Exception as error:
            error.add_note("In a dry run a step has no Trainer, and its tensors have no values.")
            raise

    def _run_whole(self, batch: Any) -> None:
        sharded = ShardedModule(self.composed, None)
        step, context = sharded.module.training_step, self.run.precision.train_step_context
        loss = Loss.of(sharded.train(step, context, *step_arguments(step, batch, 1))).value

        def differentiate() -> Tensor:
            loss.backward()
            return loss

        sharded.backward(loss, differentiate, accumulating=False)
        sharded.add_gradients()
        replicas = self._replicas()
        if replicas is not None:  # as DistributedDataParallel does, which sends nothing else
            parameters = self.composed.module.parameters()
            average([p.grad for p in parameters if p.grad is not None], replicas)

    def _replicas(self) -> DeviceGroup | None:
        """Returns the group that averages the gradients of whole layers, if there is one."""
        averaged = axis(self.ranks, *self.run.averaged_axes)
        return None if averaged is None else DeviceGroup(averaged.get_group(), _CPU)

    def _run_stages(self, batch: Any, known: Mapping[int, Sent]) -> Mapping[int, Sent]:
        split, config = self.composed.split, self.run.asked.pipeline
        assert split is not None
        assert config is not None
        staged = StagedModule(self.composed, None, config)
        note = partial(self.ledger.add, MessageKind.SEND, ("pp",))
        shape = config.shape(self.run.mesh, self.rank, split.layers_per_stage)
        links, sent = dry_links(split.rank_of_stage, shape.rank, known, note)
        options = stage_options(split.layers, staged.wrapped, None, _CPU)
        tied = TiedSums(split.ties, split.rank_of_stage, shape.rank, ChannelEnds())
        pipeline = Pipeline(split.layers, shape, links, options, shared=tied.names)
        pipeline.train_batch(batch, staged.bare_step(self.run.precision.train_step_context))
        pipeline.install_gradients()
        staged.add_gradients()
        replicas = self._replicas()
        if replicas is not None:
            average_gradients(self.composed.module.parameters(), replicas)
        gradients = pipeline.stages.named_parameters()
        for names in tied.sent.values():
            copies = [gradients[name].grad for name in names]
            note(sum(local_part(copy).nbytes for copy in copies if copy is not None))
        return sent


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)

"""Run a training step on each rank of a mesh that does not exist, and count.

Nothing is estimated, and no rule of thumb stands beside the code that trains. The user's module is
made parallel by :func:`.parallelize`, and the step is run by the same
classes as in a training. Collectives are counted where torch dispatches them. Only the layer
underneath differs: a process group without other processes, tensors without values
(:mod:`.mesh_runtime.dry.fake_ranks`), and channels to stages that are tried before and after
(:mod:`.mesh_runtime.dry.channel`).

One rank of each place in a pipeline is tried, the first along all other axes. Tensor-parallel
places are alike, for the dimensions that they shard are divisible by their number. So are places
along the data axes, unless a dimension is not divisible: there the first place holds the most.

*Counted:* a step of one batch and its backward, the gradients that remain, and the bytes that the
rank sends meanwhile. *Not counted:* activations and other temporary tensors; buffers; the
optimizer's own scalars; clipping, logging with ``sync_dist`` and metrics; synchronised BatchNorm;
the few bytes by which ranks agree on how a run goes on, and the header of a message between stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_dist.engine.common.device_mesh import build_mesh
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.composition import Parallelism, parallelize
from lightning_dist.engine.planning.dry_run_report import DryRunSummary, RankKind, collapse
from lightning_dist.engine.planning.traffic import Traffic, TrafficLedger
from lightning_dist.engine.profiling.meters.traffic_counter import TrafficCounter
from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from lightning_dist.engine.sharding.fully_shard import fill
from lightning_dist.engine.splitting.cut import skeleton_of
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.rng import python_state_kept
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.mesh_runtime.checks import check_automatic, check_shardable
from lightning_dist.strategies.mesh_runtime.dry.channel import Sent
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank, without_values
from lightning_dist.strategies.mesh_runtime.dry.step import DryStep

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """The mesh, the parallelism and the batch to try.

    Attributes:
        mesh: The sizes of the mesh.
        asked: How the module is made parallel.
        precision: Converts the module, and creates the context manager that a step runs in.
        batch: A loader's batch for one rank, of which only shapes and dtypes are used.
        optimizer_states_per_parameter: Tensors of a parameter's size that the optimizer keeps.
    """

    mesh: MeshShape
    asked: Parallelism
    precision: Precision
    batch: Any
    optimizer_states_per_parameter: int

    def run(self, module: pl.LightningModule) -> DryRunSummary:
        """Tries each place in a pipeline; the user's module is not changed.

        Raises:
            ValueError: The module cannot be made parallel so, or its step needs values.
        """
        with torch.random.fork_rng(devices=[]), python_state_kept():
            whole = self._configured(module)
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

    def _configured(self, module: pl.LightningModule) -> pl.LightningModule:
        own = skeleton_of(module)
        own.log = _ignore  # type: ignore[method-assign]  # it wants a Trainer
        with deferred_init(only_shapes=True):
            own.configure_model()
        check_shardable(own, is_manual=False)
        check_automatic(own)
        self.precision.convert_module(own)
        own.train()
        return own

    def _try(self, place: int, module: pl.LightningModule, known: dict[int, Sent]) -> RankKind:
        rank = self.mesh.rank(dict.fromkeys(self.mesh.sizes, 0) | {"pp": place})
        # Compiled or not, a step holds and sends the same.
        assert self.asked.shard is not None
        asked = replace(self.asked, shard=replace(self.asked.shard, compile=False))
        ledger = TrafficLedger()
        with fake_rank(rank, self.mesh.world_size):
            composed = parallelize(module, build_mesh(self.mesh, _CPU.type), asked)
            context = self.precision.train_step_context
            step = DryStep(
                composed=composed,
                asked=asked,
                mesh=self.mesh,
                rank=rank,
                context=context,
                ledger=ledger,
            )
            with without_values(TrafficCounter(ledger, self.mesh)):
                _move_from_meta(module)
                known |= step.run(map_tensors(_without_values, self.batch), known)
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


def _move_from_meta(module: pl.LightningModule) -> None:
    """Replaces meta tensors by tensors on the CPU, which have no memory either."""
    tensors = named_tensors(module)
    fill(module, tensors, lambda name: _without_values(tensors[name]), _CPU)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _ignore(*_: object, **__: object) -> None:
    """Logs nothing."""

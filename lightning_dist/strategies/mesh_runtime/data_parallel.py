"""Base of the strategies whose ranks read different data and synchronise in each step.

Random numbers depend on the batch alone. They differ between ranks, but for those that share the
data out. With ``sync_batchnorm=True``, BatchNorm covers all ranks on a CPU, too. Runs end together.
Before validation, a checkpoint and the end of training, the weights are made the same on all ranks.
Each rank has the whole model, unless a strategy places it otherwise.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.data_parallel.replicas import broadcast_state
from lightning_dist.engine.splitting.config import find_batch_statistics
from lightning_dist.engine.tensors.rng import RandomStream, seed_all
from lightning_dist.strategies.base import lightning_loaders
from lightning_dist.strategies.base.ending.stopping import stop_evaluations_together
from lightning_dist.strategies.base.loaders.lengths import EvaluationLengths, TrainingLengths
from lightning_dist.strategies.base.loaders.shared_order import share_order, with_shared_draws
from lightning_dist.strategies.base.model_checks import check_own_averages
from lightning_dist.strategies.base.run_setup import RunSetup
from lightning_dist.strategies.mesh_runtime import replica_checks
from lightning_dist.strategies.mesh_runtime.synced_batch_norm import synchronise
from lightning_dist.strategies.pipelining.start_line import explain_own_statistics

# Uses of the random numbers that all ranks share.
_HOOKS, _ITERATORS, _ORDER, _UPDATE, _BATCH = range(5)


class DataParallelStrategy(RunSetup):
    """Base of strategies with data axes; see the module's docstring."""

    _num_loaders: Counter[tuple[int, bool]]
    _has_unknown_length = False
    _lengths: TrainingLengths | None = None
    _evaluation_lengths: EvaluationLengths | None = None

    def share_buffers(self) -> None:
        """Broadcasts the first replica's buffers. Collective: every rank must call it."""
        broadcast_state(self.module.buffers(), self.device_group(*self.stage_axes))

    def synchronise_layers(self) -> None:
        """Synchronises BatchNorm over the replicas if the Trainer has ``sync_batchnorm=True``."""
        self._layer_sync = synchronise(self._layer_sync, self.module, self.data_device_group)

    def explain_batch_statistics(self) -> None:
        """Prints which modules normalise by a rank's part of the batch, if there is such a part."""
        found = [] if self._layer_sync is not None else find_batch_statistics(self.module)
        if self.mesh.data_size > 1 and found:
            rank_zero_info(explain_own_statistics(found))

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        replica_checks.check_whole(self.module)
        replica_checks.check_module(self.module, self.world_group)

    def check_steps_apart(self, trainer: pl.Trainer) -> None:
        """Checks that no step of this rank needs another rank's."""
        parts = self.module.modules()
        if self._layer_sync is not None or any(isinstance(p, nn.SyncBatchNorm) for p in parts):
            raise ValueError(
                "Synchronised BatchNorm waits in its forward for all ranks, and here each one steps"
                " by itself. Leave it out, or use DDPStrategy or ParameterServerStrategy()."
            )
        if self.world_size > 1:
            check_own_averages(trainer, (WeightAveraging,))

    @override
    def place_model(self, trainer: pl.Trainer) -> None:
        self.model = self.precision_plugin.convert_module(self.module)
        if self.is_fitting:
            self.synchronise_layers()
            if self._layer_sync is not None:
                self._undo += (partial(self._layer_sync.revert, self.module),)
        self.model_to_device()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_state(tensors, self.data_device_group)

    @override
    def connect_loops(self, trainer: pl.Trainer) -> None:
        self._num_loaders = Counter()
        self._has_unknown_length, self._lengths = False, None
        super().connect_loops(trainer)
        lengths = self._compare_evaluations(trainer) if self.num_readers > 1 else None
        self._evaluation_lengths = lengths
        if not self.is_fitting:
            all_have = (lambda *_: True) if lengths is None else lengths.all_have
            self._undo += (stop_evaluations_together(trainer, self.guard, all_have),)
            return
        if self.num_readers > 1:
            notes = self.make_notes(self.world_group)
            self._lengths = TrainingLengths(notes, self.world_group)
        self._undo += (self._seed_alike,)  # the script goes on with the same numbers on all ranks
        if self.mesh.data_size > 1:
            streams = partial(self._shared_stream, _HOOKS)
            wrap = partial(with_shared_draws, open_stream=streams)
            self._undo += (lightning_loaders.replace_loader_hooks(trainer, wrap),)

    @override
    def close_session(self) -> None:
        super().close_session()
        # A copy of the Trainer has no notes of a run.
        self._lengths = self._evaluation_lengths = None

    def _compare_evaluations(self, trainer: pl.Trainer) -> EvaluationLengths:
        axes, mesh = ("pp", "dp_shard", "tp"), self.mesh
        is_tied = any(mesh.sizes[axis] > 1 for axis in axes)
        lengths = EvaluationLengths(
            trainer,
            lambda: self.world_group,
            mesh.groups(*axes),
            self.group(*axes) if is_tied else None,
            runs_whole_steps=mesh.pp == 1,
        )
        self._undo += (lengths.connect(),)
        return lengths

    @override
    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: ReduceOp | str | None = "mean",
    ) -> Tensor | Any:
        self.check_peers()
        if self._evaluation_lengths is not None and group is None:
            self._evaluation_lengths.combine_in_step()
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self.check_peers()
        if self._evaluation_lengths is not None and group in (None, dist.group.WORLD):
            self._evaluation_lengths.combine_in_step()
        return super().all_gather(tensor, group, sync_grads)

    @override
    def before_reading(self) -> None:
        self.seed_data_rank(reading=True)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch to a device, and seeds all ranks alike for the hooks ahead of a step.

        These hooks may write weights.
        """
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.module.trainer.training:
            self._seed_alike(_BATCH)
        return batch

    @override
    def begin_epoch(self) -> None:
        self._check_lengths()  # loaders may have been reloaded
        self._seed_alike()

    @override
    def end_epoch(self) -> None:
        if self._lengths is not None:
            self._lengths.end_epoch(self.module.trainer)

    def _check_lengths(self) -> None:
        if self._lengths is not None:
            trainer = self.module.trainer
            self._lengths.begin_epoch(trainer, is_unknown=self._has_unknown_length)

    def _shared_stream(self, *place: int) -> RandomStream:
        """Returns random numbers that depend on the seed, the batch and a place, on no rank."""
        return RandomStream(self.seed, self.batch_index, *place)

    def _seed_alike(self, use: int = _ITERATORS) -> None:
        """Seeds the global generators by the batch at hand, alike on all ranks."""
        if self.mesh.data_size > 1:
            seed_all(self.seed, self.batch_index, use, device=self.root_device)

    def seed_update(self) -> None:
        """Seeds the generators alike on all ranks, behind a backward.

        Hooks and the optimizer may add noise to gradients or weights, which replicas have alike. A
        step that calls backward by itself may go on, and draw samples, which differ.
        """
        if self.module.automatic_optimization:
            self._seed_alike(_UPDATE)

    @override
    def share_order(self, dataloader: object) -> object:
        trainer = self.module.trainer
        if trainer.state.fn != TrainerFn.FITTING or self.mesh.data_size == 1:
            return dataloader
        # Several loaders of one stage must not be shuffled alike. The number begins anew with each
        # batch, lest it depend on how often they were reloaded before the run was resumed.
        number = self._num_loaders[self.batch_index, trainer.training]
        self._num_loaders[self.batch_index, trainer.training] += 1
        stream = partial(self._shared_stream, _ORDER, int(trainer.training), number)
        seed_reader = partial(self.seed_data_rank, reading=True, early=True)
        return share_order(
            dataloader, stream, seed_reader if trainer.training else None, self._seed_alike
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self.module.trainer.training:
            self._has_unknown_length = self._has_unknown_length or sized_len(dataloader) is None
            self._seed_alike()  # its iterator is made next
        return dataloader

    @override
    def on_train_start(self) -> None:
        self._check_lengths()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._lengths is not None:
            self._lengths.begin_batch(is_last=self.module.trainer.is_last_batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seed_data_rank(reading=False)
        with self.precision_plugin.train_step_context():
            return self.module.training_step(*args, **kwargs)

    @override
    def end_batch(self) -> None:
        if self._lengths is not None:
            self._lengths.end_batch()

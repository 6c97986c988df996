"""Pipeline parallelism under an unchanged LightningModule.

Each rank calls the user's own ``training_step`` per micro-batch; see :mod:`.pipeline.stage`.
Gradients are computed there, while Lightning calls ``zero_grad`` after it. So the pipeline holds
them and ``backward`` installs them. Clipping, the optimizer's step, schedulers and callbacks happen
at Lightning's own places.

An asynchronous pipeline is not flushed between batches. A stage that is still filling has nothing
to apply; any other applies the update of an earlier batch, with that batch's learning rate.
:meth:`PipelineStrategy.drain` catches up: before validation, a checkpoint, and the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.engine.checkpoint.optimizer_state import keep_own_parameters
from lightning_dist.engine.common.mesh_shape import DATA_AXES, MeshShape
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.data_parallel.replicas import broadcast_state
from lightning_dist.engine.parallelize.composition import parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.separate_updates import check_separate_updates
from lightning_dist.engine.pipeline.measurements import (
    MeasuredStages,
    gather_measurements,
    predict_memory,
)
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart
from lightning_dist.engine.schedules.update_rule import WeightVersions
from lightning_dist.engine.splitting.config import (
    PipelineConfig,
    ScheduleName,
    StalenessCorrection,
    Transport,
    share_among_stages,
    with_whole_batches,
)
from lightning_dist.strategies.base import lightning_internals, model_checks
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.base.ending.brief_errors import brief_mistakes
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.base.run_setup import Step, StepContext
from lightning_dist.strategies.mesh_runtime.first_call import TracesModels
from lightning_dist.strategies.mesh_runtime.replica_checks import check_whole
from lightning_dist.strategies.mesh_runtime.synced_batch_norm import synchronise
from lightning_dist.strategies.pipelining import checks
from lightning_dist.strategies.pipelining.movable_layers import MovableLayers
from lightning_dist.strategies.pipelining.results.staleness_log import (
    DISCREPANCY,
    STALENESS,
    STASH_BYTES,
)
from lightning_dist.strategies.pipelining.session import Session


class PipelineStrategy(MeasuredStages, TracesModels, MovableLayers):
    """Cuts a model into stages, one per rank, and trains it unchanged.

    The world size is the number of stages, over the stages per rank, times the data replicas.

    Args:
        num_stages: Number of stages on all ranks together; ``"auto"`` takes all ranks.
        schedule: Name of a schedule, see :mod:`.schedules.registry`, or ``"file:"`` and the path
            of a CSV file. All equal single-device training but ``"pipedream"`` and
            ``"pipedream_2bw"``, which never wait, at the price of stale weights (Narayanan et al.,
            SOSP 2019 and ICML 2021).
        num_microbatches: Number of micro-batches of each Lightning batch. ``"auto"`` is 4 per rank
            for synchronous schedules (fewer where each would have one sample, and 1 for one rank),
            1 for ``"pipedream"`` and 1 per rank for ``"pipedream_2bw"``. A module with BatchNorm
            gets 1, if the schedule can: its statistics are then those of the batch. Under a
            synchronous schedule a batch of fewer samples, as an epoch's last, is cut into fewer.
        layers: Dotted path of the ``nn.Sequential`` whose children are the layers, or of the
            ``nn.ModuleList`` or ``nn.Sequential`` of a model's blocks. ``"auto"`` takes the Hugging
            Face model (by its own pipeline plan), or else the sequence, or else the model that runs
            one list of blocks in order, that holds the trainable parameters. Any other module is
            traced. ``"trace"`` cuts the module that holds them with torch.export, whatever its
            forward is; ``"trace:path"`` cuts the module of that path. The example of its arguments
            is ``example_input_array``, or those of the step's call, run so far on the first batch
            ahead of the run. Layers begin where parts of the module reach their parameters.
        partition: ``"parameters"`` balances the number of parameters, ``"uniform"`` the number of
            layers; a list has the layers per stage. ``"profile"`` balances time: the first training
            batch is run some times without effect, then layers move to balance the times. A run
            that trains nothing is cut by parameters.
        weight_versions: Weights of a backward under ``"pipedream"``. ``"stash"`` takes those of the
            batch's forward; ``"vertical_sync"`` does too, and takes the same version on all stages;
            ``"none"`` does neither, only to study the benefit of stashing.
        stages_per_rank: Number of stages on each rank; ``"auto"`` takes the fewest that the
            schedule needs.
        staleness_correction: ``"predict"``, for ``"pipedream"`` and ``"pipedream_2bw"``, computes a
            batch with the weights that the optimizer's own momentum predicts for the batch's
            update. ``"lr"``, for ``"pipedream"``, lowers the rate of a stage whose weights are
            stale by ``t`` updates: ``rate / t ** (1 - min(k / correction_steps, 1))`` at update
            ``k`` (PipeMare: Yang et al., MLSys 2021).
        correction_steps: Updates until all stages train with the full rate.
        transport: How tensors travel between stages. ``"p2p"`` sends each as it is, on the device's
            backend: over NCCL from GPU to GPU. Their shapes must depend on the batch's shapes only.
            ``"gloo"`` packs them in host memory, and sends their shapes along. ``"auto"`` takes
            ``"p2p"`` unless the device's backend is gloo.
        log_staleness: Whether to log the age of each stage's weights in updates
            (``staleness/stage_0``) and the bytes of the versions that the stage keeps
            (``stash_bytes/stage_0``), of the newest update that all stages have made.
        log_discrepancy: Whether to log the change of a stage's weights ``w`` from a batch's forward
            to its update, ``||w_forward - w_now|| / ||w_now||`` (``weight_discrepancy/stage_0``).
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is unknown, or does not go with another.
    """

    def __init__(
        self,
        num_stages: int | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        num_microbatches: int | Literal["auto"] = "auto",
        layers: str = "auto",
        partition: Literal["parameters", "uniform", "profile"] | list[int] = "parameters",
        weight_versions: WeightVersions = "stash",
        stages_per_rank: int | Literal["auto"] = "auto",
        staleness_correction: StalenessCorrection = "none",
        correction_steps: int = 1000,
        transport: Transport = "auto",
        log_staleness: bool = False,
        log_discrepancy: bool = False,
        **arguments: Unpack[RunArguments],
    ) -> None:
        if num_stages != "auto":
            check_count("num_stages", num_stages, instead="'auto'")
        with brief_mistakes():
            config = PipelineConfig(
                schedule=schedule,
                num_microbatches=num_microbatches,
                layers=layers,
                partition=partition,
                weight_versions=weight_versions,
                stages_per_rank=stages_per_rank,
                staleness_correction=staleness_correction,
                correction_steps=correction_steps,
                transport=transport,
            )
        super().__init__(config=config, **arguments)
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._statistics: tuple[str, ...] = ()
        self._logged = [STALENESS, STASH_BYTES] * log_staleness + [DISCREPANCY] * log_discrepancy

    # --- where this rank is ------------------------------------------------------------------

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return share_among_stages(world_size, self._num_stages, self._config)

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that weights are stale."""
        return self._config.asynchronous

    @property
    @override
    def stop_lag(self) -> int:
        num_stages = self.mesh.pp
        count = self._config.training_microbatches(num_stages)
        return 1 + self._config.family.update_rule.lag(num_stages, count)

    @override
    def view(self) -> RankView:
        pipeline = None if self._session is None else self._session.pipeline
        return replace(super().view(), has_stages=True, pipeline=pipeline, layers=self)

    @override
    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory:
        return predict_memory(self.session.pipeline, part)

    # --- setup and teardown ------------------------------------------------------------------

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        check_whole(self.module)
        self._config = replace(self._config, num_microbatches=self._num_microbatches)
        self._statistics = checks.find_statistics_of_all(self.module, self.world_group)
        if self._statistics:
            self._config = with_whole_batches(self._config, self.mesh.pp)
        if self.is_fitting:
            num_stages = len(self._config.rank_of_stage(self.mesh.pp))
            checks.check_trainer(trainer, self.module, self._config, num_stages)
            if self.mesh.data_size > 1:
                model_checks.check_dense_gradients(self.module, "averages of replicas")
        elif self._config.partition == "profile":
            rank_zero_info(
                "partition='profile' measures while it trains. This run does not, and is cut by"
                " parameters."
            )

    @override
    def place_model(self, trainer: pl.Trainer) -> None:
        self.model = self.precision_plugin.convert_module(self.module)  # a trace builds dtypes in
        plugin = half_precision_of(self.precision_plugin)
        half = None if plugin is None else plugin.half
        are_joint = self.is_fitting and self.mesh.data_size > 1 and self.has_joint_statistics
        asked = Parallelism(
            self._config,
            shard=None,
            half=half,
            example=self.example_of_call(trainer, half),
            joint_statistics=self._statistics if are_joint else (),
        )
        self._known_split = parallelize(self.module, self.mesh_of_ranks, asked).split
        if are_joint:
            self._synchronise_statistics()
        if self.is_fitting and self._config.partition == "profile":
            self.check_layers_can_move()

    def _synchronise_statistics(self) -> None:
        replicas = self.device_group(*DATA_AXES, purpose="statistics")  # while others are in use
        with self._split.whole():  # other stages' layers may come here
            self._layer_sync = synchronise(self._layer_sync, self.module, replicas)
        self._undo += (self._revert_statistics,)

    def _revert_statistics(self) -> None:
        if self._layer_sync is not None:
            with self._split.whole():
                self._layer_sync.revert(self.module)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with checks.one_optimizer():
            super().setup_optimizers(trainer)
        model_checks.check_optimizers(self.optimizers)

    @override
    def keep_own_part(self) -> None:
        self._split.cut()  # not before, for `configure_optimizers` may read any parameter's value
        if self.is_fitting:
            checks.check_saved_names(self.module, self._split)
        for optimizer in self.optimizers:
            lightning_internals.mark_optimizer_called(optimizer)
            if self.mesh.pp > 1:
                check_separate_updates(optimizer, "stage")
            keep_own_parameters(optimizer, self.module)
        self.model_to_device()
        lightning_internals.move_optimizers(self.optimizers, self.root_device)
        state = [*self.module.parameters(), *self.module.buffers()]
        broadcast_state(state, self.data_device_group)
        broadcast_state(self._split.tensors_outside(self.module), self.device_group("pp"))

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        self._session = Session(
            self,
            self._split,
            self._config,
            self.complete_gradients,
            complete_early=self.complete_early,
            optimizer=next(iter(self.optimizers), None),
            logged=self._logged,
            statistics=self._statistics,
        )

    @override
    def close_session(self) -> None:
        session, self._session = self._session, None
        super().close_session()
        if session is not None:
            session.close(failed=not self.is_running)

    # --- steps -------------------------------------------------------------------------------

    @override
    def evaluate(self, step: Step, context: StepContext, *args: Any, **kwargs: Any) -> Any:
        if not self.is_fitting:  # see `ending.stopping`
            self.guard.stop_if_agreed()
        arguments = checks.flatten_arguments(args, kwargs)
        with self.stepping():
            return self.session.runner.evaluate(step, arguments, context)

    @override
    def end_training(self) -> None:
        super().end_training()
        if self.session.staleness_log is not None:
            self.session.staleness_log.finish()
        self._measurements = gather_measurements(self.session.pipeline, self.world_group, self.mesh)

"""Data parallelism: each rank has the whole model and its own share of each batch.

torch's DistributedDataParallel averages the gradients, in buckets, while the backward runs. This
strategy adds to it and to Lightning's own: one base with the other strategies here, which brings
their checkpoints, failures and stopping; compressed gradients over gloo as over NCCL;
static graphs together with accumulation; errors that name the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Unpack

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.data_parallel.ddp_options import Compression, GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig, OuterOptimizer, Wire
from lightning_dist.engine.parallelize.composition import parallelize
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, replicated
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.base.loaders.uneven import UnevenInputs
from lightning_dist.strategies.base.run_setup import Closure
from lightning_dist.strategies.mesh_runtime import replica_checks
from lightning_dist.strategies.mesh_runtime.layout_line import describe_replicas
from lightning_dist.strategies.mesh_runtime.local_replicas import LocalReplicas


class DDPStrategy(LocalReplicas):
    """Trains replicas of a model on shares of each batch.

    Args:
        compression: Format of sent gradients: ``"none"``, ``"fp16"``, ``"bf16"``, ``"int8"``,
            ``"topk"`` or ``"powersgd"``. The last three add what they lose to the next gradients.
        topk_fraction: Part of each gradient's elements that ``"topk"`` sends, the largest ones.
        powersgd_rank: Columns of PowerSGD's factors; more are more exact and larger.
        powersgd_start_step: Steps with whole gradients before PowerSGD begins, and begins anew when
            other parameters are frozen or thawed.
        sync_every: Optimizer steps from one average of the weights to the next. Above 1, replicas
            step on their own gradients, and average their weights also before validation, in
            checkpoints and at the end (local SGD).
        sync_warmup_steps: Optimizer steps with averaged gradients before local SGD begins.
        outer: Steps from the weights of one average to those of the next, as DiLoCo does. None
            takes the average itself. What ends a round of ``sync_every`` steps early, such as
            validation or a checkpoint, steps too.
        fragments: Parts of the model whose rounds end in turns, as in Streaming DiLoCo; with
            ``outer``, as the next three.
        delay: Local steps that are done while an average is under way.
        alpha: The part of a replica's own weights that stays when an average has come, below 1.
        wire: What is sent: ``"fp32"``, the weights as they are, or ``"bf16"``, outer gradients.
        bucket_megabytes: Size of the buckets that gradients are sent in.
        overlap: Whether gradients are sent while the backward runs. False sends all gradients when
            the backward is done, whatever ``bucket_megabytes``: to measure the gain of overlap, and
            for links and machines on which sending slows the backward down more than it saves.
        static_graph: Whether each step uses the same parameters in the same order.
        find_unused_parameters: Whether to allow steps that do not use all parameters on any rank,
            which are an error otherwise. A parameter that only some ranks leave out counts as zero
            there, with this option or without. Does not go with ``"powersgd"``.
        uneven_inputs: Whether ranks may have different numbers of training batches, at least one
            each. A rank that has run out goes on with empty steps; each step is a mean over the
            ranks that have data for it. Hooks and callbacks of that rank see its last batch again,
            with a loss of zero, and values logged per step stay those of its last step. Lightning's
            own sampler, which repeats samples until nothing is uneven, must be switched off
            (``Trainer(use_distributed_sampler=False)``).
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is unknown or too small.
    """

    def __init__(
        self,
        compression: Compression = "none",
        topk_fraction: float = 0.01,
        powersgd_rank: int = 2,
        powersgd_start_step: int = 1000,
        sync_every: int = 1,
        sync_warmup_steps: int = 0,
        outer: OuterOptimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        wire: Wire = "fp32",
        bucket_megabytes: float = 25.0,
        overlap: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        uneven_inputs: bool = False,
        **arguments: Unpack[RunArguments],
    ) -> None:
        local = LocalConfig(sync_every, sync_warmup_steps, outer, fragments, delay, alpha, wire)
        super().__init__(local, **arguments)
        self._exchange = GradientExchange(
            compression=compression,
            topk_fraction=topk_fraction,
            powersgd_rank=powersgd_rank,
            powersgd_start_step=powersgd_start_step,
            overlap=overlap,
            bucket_megabytes=bucket_megabytes,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        replica_checks.check_exchange(self._exchange, local)
        if uneven_inputs:
            replica_checks.check_uneven(self._exchange, local)
        self._uneven_inputs = uneven_inputs
        self._uneven: UnevenInputs | None = None

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        return MeshShape(dp_replicate=world_size)

    @property
    def sync_every(self) -> int:
        """Optimizer steps from one average of the weights to the next; 1 averages gradients."""
        return self._local_config.sync_every

    @override
    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory:
        return replicated(part, self.mesh.data_size, accumulates=accumulates)

    # --- setup and teardown ------------------------------------------------------------------

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        super().check_run(trainer)
        if self.is_fitting:
            replica_checks.check_compressible(self.module, self._exchange.compression)

    @override
    def place_model(self, trainer: pl.Trainer) -> None:
        super().place_model(trainer)
        replicas = self.replica_options(self._exchange)
        how = Parallelism(shard=None, replicas=replicas if self.is_fitting else None)
        self._replica = parallelize(self.module, self.mesh_of_ranks, how).replica

    @override
    def print_summary(self) -> None:
        number = sum(parameter.numel() for parameter in self.module.parameters())
        rank_zero_info(describe_replicas(self.mesh, number, self._exchange, self._local_config))
        self.explain_batch_statistics()

    @override
    @contextmanager
    def summarised_module(self) -> Iterator[None]:
        yield  # a replica is whole, and an example can run through it

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._exchange.static_graph and len(self.optimizers) > 1:
            raise ValueError(
                f"static_graph=True does not go with {len(self.optimizers)} optimizers: only the"
                " parameters of the first one's backward would be averaged. Pass"
                " find_unused_parameters=True in its place."
            )

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        super().open_session(trainer)
        if self._uneven_inputs and self.is_fitting:
            replica_checks.check_uneven_module(
                self.module, has_layer_sync=self._layer_sync is not None
            )
            timeout = timedelta(seconds=self.timeout_seconds)
            self._uneven = UnevenInputs(self.module, self.data_group, timeout)

    @override
    def drain(self) -> None:
        """Averages local SGD's weights and broadcasts buffers. Collective: every rank must call it.

        Validation, checkpoints and the end of training call it by themselves.
        """
        if self._local is None:
            return
        self.check_peers()
        if self.is_running:
            self.average_weights()
            self.share_buffers()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._uneven is not None and self.module.trainer.training:
            return self._uneven.prolong(dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        if self._uneven is not None:
            loader = self.module.trainer.train_dataloader
            if loader is not self._uneven.loader:
                raise ValueError(
                    "uneven_inputs=True needs one training loader, not a"
                    f" {type(loader).__name__} of loaders."
                )
        super().on_train_start()

    @override
    def close_session(self) -> None:
        super().close_session()
        if self._uneven is not None:
            self._uneven.close(failed=not self.is_running)
        self._uneven = None

    # --- collectives in steps ----------------------------------------------------------------

    @override
    def reduction_group(self, tensor: Tensor) -> dist.ProcessGroup:
        # While a step runs, those of the replicas that take part in it.
        present = None if self._uneven is None else self._uneven.step_group
        return present or super().reduction_group(tensor)

    # --- steps -------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seed_data_rank(reading=False)
        with self.precision_plugin.train_step_context():
            step = self.module.training_step
            if self._replica is None:  # behind a run
                return step(*args, **kwargs)
            if self._uneven is not None:
                return self._uneven.run(self._replica.ddp, step, *args, **kwargs)
            return self._replica.run(step, *args, is_local=self.is_local, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._uneven is not None:
            self._uneven.begin_backward(closure_loss)
        super().pre_backward(closure_loss)

    @override
    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        with self.updating():
            return apply()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.keeping_gradients():
            yield

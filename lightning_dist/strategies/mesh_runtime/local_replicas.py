"""Base of the strategies whose replicas can step by themselves, and average their weights.

Inside of a replica may be shards, stages and tensor-parallel ranks: each rank averages what it
holds with the same ranks of the other replicas. A replica that is whole on its rank may be a
:class:`.WrappedReplica`, which averages its gradients in steps that are not its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.data_parallel.ddp_options import GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.local_sgd import LocalSGD, OuterSteps
from lightning_dist.engine.data_parallel.wrapped_replica import ReplicaOptions, WrappedReplica
from lightning_dist.strategies.base.model_checks import check_learning_rates, check_own_averages
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.mesh_runtime.data_parallel import DataParallelStrategy

_MOMENTUM = "outer_momentum"  # a checkpoint's key


class LocalReplicas(DataParallelStrategy):
    """Base class; see the module's docstring."""

    def __init__(self, local: LocalConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._local_config = local
        self._local: LocalSGD | None = None
        self._replica: WrappedReplica | None = None
        self._outer_steps: OuterSteps | None = None
        self._loaded_momentum: dict[str, Tensor] = {}

    @override
    def view(self) -> RankView:
        return replace(super().view(), local_steps=self._local_config.sync_every - 1)

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        super().check_run(trainer)
        if self.is_fitting and self.mesh.data_size > 1 and self.view().local_steps:
            check_own_averages(trainer, (WeightAveraging, StochasticWeightAveraging))

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        if not self.is_fitting:
            return
        fragments = self._local_config.fragments
        if fragments > 1:
            own = len(list(self.module.parameters()))
            fewest = min(gather_objects(own, self.world_group))
            if fragments > fewest:
                raise ValueError(
                    f"fragments={fragments} are more than the {fewest} parameters of a rank. Use up"
                    f" to {fewest}."
                )
        self._local = LocalSGD(self.module, self.device_group("dp_replicate"), self._local_config)
        self._outer_steps = self._local.outer
        if self._outer_steps is not None:
            self._outer_steps.load_momentum(self.module, self._loaded_momentum)
            self._loaded_momentum = {}

    @override
    def close_session(self) -> None:
        super().close_session()
        # A script may save a checkpoint behind the run: the outer momentum stays for it.
        self._local = None
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.close(failed=not self.is_running)

    # --- steps -------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._replica is not None:
            # Behind the hooks that freeze and unfreeze, ahead of all contexts of the step.
            self._replica.begin_batch(is_local=self.is_local)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._replica is not None:
            self._replica.begin_backward(closure_loss, is_local=self.is_local)

    def end_backward(self) -> None:
        """Completes the gradients of a wrapped replica, if this backward was to average them."""
        if self._replica is not None:
            self._replica.end_backward(is_local=self.is_local)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps a step and the update that it brings."""
        if not self.is_local:
            if self._replica is not None:
                self._replica.wrap()
            yield
            return
        assert self._local is not None
        self._local.begin_step()
        with self.keeping_gradients():
            yield
        self._local.count_step()  # and averages the weights that are due

    def keeping_gradients(self) -> AbstractContextManager[None]:
        """Returns a context manager in which a backward of a wrapped replica averages nothing."""
        return nullcontext() if self._replica is None else self._replica.keeping_gradients()

    @property
    @override
    def gradient_axes(self) -> tuple[str, ...]:
        return ("dp_shard",) if self._local_config.averages_weights else DATA_AXES

    def replica_options(self, exchange: GradientExchange) -> ReplicaOptions:
        """Returns how whole replicas average their gradients. Collective."""
        return ReplicaOptions(
            exchange=exchange,
            group=self.data_device_group,
            control_group=self.data_group,
            make_notes=partial(self.make_notes, self.data_group),
            is_automatic=lambda: self.module.automatic_optimization,
        )

    @property
    def is_local(self) -> bool:
        """Whether the next optimizer step is this replica's own."""
        return self._local is not None and self._local.is_local(self.module.trainer.global_step)

    def average_weights(self) -> None:
        """Ends all rounds. Collective: every rank must call it."""
        if self._local is not None:
            self._local.average()

    @override
    def check_optimizers_agree(self) -> None:
        super().check_optimizers_agree()
        if self.is_running and self.has_plain_state and not self.replicas_step_alone:
            check_learning_rates(self.optimizers, self.data_group)

    # --- checkpoints -------------------------------------------------------------------------

    @property
    @override
    def replicas_step_alone(self) -> bool:
        return self._local_config.averages_weights and self.mesh.dp_replicate > 1

    @override
    def extra_state(self) -> dict[str, Any]:
        if self._outer_steps is None:
            return {}
        return {_MOMENTUM: self._outer_steps.momentum_by_name(self.module)}

    @override
    def load_extra_state(self, checkpoint: Mapping[str, Any]) -> None:
        if self.is_fitting:
            self._loaded_momentum = checkpoint.get(_MOMENTUM, {})

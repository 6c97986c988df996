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
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.data_parallel.ddp_options import GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.local_sgd import LocalSGD, OuterSteps
from lightning_dist.engine.data_parallel.replicas import broadcast_state, find_difference
from lightning_dist.engine.data_parallel.wrapped_replica import ReplicaOptions, WrappedReplica
from lightning_dist.strategies.base.model_checks import check_learning_rates, check_own_averages
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.base.run_setup import Closure
from lightning_dist.strategies.mesh_runtime.data_parallel import DataParallelStrategy

_MOMENTUM = "outer_momentum"  # a checkpoint's key


class LocalReplicas(DataParallelStrategy):
    """Base class; see the module's docstring."""

    _has_warned = False

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
        self._take_momentum()

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
        self._take_new_parameters()
        if self._replica is not None:
            # Behind the hooks that freeze and unfreeze, ahead of all contexts of the step.
            self._replica.begin_batch(is_local=self.is_local)

    def _take_new_parameters(self) -> None:
        """Averages parameters that hooks have added, too. Collective: every rank must call it.

        Raises:
            ValueError: The replicas average their weights by a plan of the parameters.
        """
        if self._replica is None:
            return
        groups = (
            group["params"] for optimizer in self.optimizers for group in optimizer.param_groups
        )
        if all(map(self._replica.knows, chain.from_iterable(groups))):
            return
        if self._local_config.averages_weights:
            raise ValueError(
                "The optimizer has parameters that were not there at the start of the run, and"
                f" local={self._local_config} averages those that were. Add them in"
                " `configure_model`, or start another run."
            )
        self._replica.restart()
        broadcast_state(self.module.parameters(), self.data_device_group)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Closure, model: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, LBFGS) and self.mesh.data_size > 1 and not self.is_local:
            closure = partial(self._mean_of, closure)  # all ranks must take the same step lengths
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _mean_of(self, closure: Closure) -> Any:
        loss = closure()
        return self.reduce(loss.detach()) if isinstance(loss, Tensor) else loss

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._replica is not None:
            self._replica.begin_backward(closure_loss, is_local=self.is_local)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs the backward, and completes gradients before ``on_after_backward``."""
        self.pre_backward(closure_loss)
        plugin, module = self.precision_plugin, self.module
        loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        self.complete_backward()
        self.seed_update()
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def complete_backward(self) -> None:
        """Completes the gradients behind a backward."""
        self.end_backward()

    def end_backward(self) -> None:
        """Completes the gradients of a wrapped replica, if this backward was to average them."""
        if self._replica is not None:
            self._replica.end_backward(is_local=self.is_local)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps a step and the update that it brings."""
        if not self.is_local:
            if self._replica is not None:
                self._replica.check_averaged()
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

    @property
    @override
    def update_axes(self) -> tuple[str, ...]:
        return self.gradient_axes if self.is_local else DATA_AXES

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
            self._compare_weights()

    def _compare_weights(self) -> None:
        """Warns of weights that have drifted apart. Collective: every rank must call it."""
        name = find_difference(self.module.named_parameters(), self.data_group)
        if name is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"The replicas have other values of {name!r}. Gradients are averaged, so something"
                " else differs: a hook or a step that writes weights or gradients by random numbers"
                " or on one rank only, or an optimizer that follows one rank's loss. Each replica"
                " goes on with its own; a checkpoint has rank 0's."
            )

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
        if not self.is_fitting:
            return
        self._loaded_momentum = checkpoint.get(_MOMENTUM, {})
        if self._local is not None:  # training has begun: the learning rate finder goes back
            self.drain()
            self._take_momentum()
            if self._replica is not None:
                self._replica.restart()  # without what gradients have lost

    def _take_momentum(self) -> None:
        momentum, self._loaded_momentum = self._loaded_momentum, {}
        if self._outer_steps is not None:
            self._outer_steps.load_momentum(self.module, momentum)

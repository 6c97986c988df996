"""A parameter server: workers push gradients to servers, which step, and pull weights from them.

Each rank runs Lightning's ``fit`` and is a worker, with its share of the data as under DDP. The
first ranks are servers too, in threads of their worker's process. A process that only served would
have to go through Lightning's loops, hooks and collectives all the same. The optimizer's step is at
the server, so only servers have its state. Where workers share no step, they share no collective
in one either: what they must agree on travels with what they push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.common.device_group import NEVER
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.table import format_count
from lightning_dist.engine.comms.failures.peer_failure import Failure
from lightning_dist.engine.comms.votes import JointDecision, PendingSum, StopAgreement
from lightning_dist.engine.data_parallel.replicas import broadcast_state, differing
from lightning_dist.engine.data_parallel.server.messages import (
    Arrival,
    Compensation,
    ServerMode,
    ServerOptions,
)
from lightning_dist.engine.data_parallel.server.session import ServerSession
from lightning_dist.engine.data_parallel.server.stops import Decisions, ServerDecision, ServerStop
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.base import lightning_internals
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.base.metrics import reduce_metrics_over
from lightning_dist.strategies.base.model_checks import (
    check_dense_gradients,
    check_learning_rates,
)
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.base.run_setup import Closure
from lightning_dist.strategies.mesh_runtime import replica_checks
from lightning_dist.strategies.mesh_runtime.data_parallel import DataParallelStrategy


class ParameterServerStrategy(DataParallelStrategy):
    """Trains workers on shares of the data, with weights and optimizer at servers.

    A gradient is clipped by its worker. The learning rate of an update is that of the worker whose
    gradient it is.

    Args:
        mode: ``"sync"`` steps on the mean of all workers' gradients, as DDP does. ``"async"``
            steps on each gradient as it comes. ``"bounded"`` does so within ``max_staleness``
            (stale synchronous parallel).
        max_staleness: Updates that a worker may be ahead of the slowest one, with ``"bounded"``.
        num_servers: Number of servers, on the first ranks. Each has whole tensors, and about as
            many elements as the others.
        compensation: ``"dc-asgd"`` corrects a gradient for the updates since its worker's pull, by
            ``strength * gradient ** 2 * (present - pulled weights)``. A server then remembers what
            it has sent to each worker.
        compensation_strength: The strength of that.
        record_arrivals: Whether servers note the order of pushes and pulls; see :attr:`arrivals`.
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is unknown, out of range, or does not go with another one.
    """

    def __init__(
        self,
        mode: ServerMode = "sync",
        max_staleness: int | None = None,
        num_servers: int = 1,
        compensation: Compensation = "none",
        compensation_strength: float = 0.04,
        record_arrivals: bool = False,
        **arguments: Unpack[RunArguments],
    ) -> None:
        super().__init__(**arguments)
        self._options = ServerOptions(
            mode, max_staleness, num_servers, compensation, compensation_strength, record_arrivals
        )
        self._decisions = Decisions()
        self._session: ServerSession | None = None  # while a fit is set up
        self._own_values: list[dict[str, Any]] | None = None
        self._arrivals: Sequence[Arrival] = ()
        self._has_servers = False
        self._living: tuple[int, ...] = ()  # if workers were lost
        self._survivors: dict[tuple[str, str], dist.ProcessGroup] = {}

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        servers = self._options.num_servers
        if servers > world_size:
            raise ValueError(
                f"num_servers={servers} does not fit {world_size} ranks: a server is on a worker's"
                f" rank. Pass num_servers={world_size} or fewer."
            )
        return MeshShape(dp_replicate=world_size)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """What came to this rank's server and was sent by it, in order, if it is recorded."""
        return tuple(self._arrivals)

    @property
    def _shares_steps(self) -> bool:
        """Whether each step ties all ranks."""
        return self._options.mode == "sync"

    @override
    def view(self) -> RankView:
        return replace(super().view(), local_steps=0 if self._shares_steps else 1)

    @override
    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory | None:
        return None

    # --- setup and teardown ------------------------------------------------------------------

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        super().check_run(trainer)
        if self.is_fitting:
            if not self.module.automatic_optimization:
                raise ValueError(
                    "automatic_optimization=False does not go with ParameterServerStrategy: servers"
                    " step, once for each batch. Use automatic optimization, or DDPStrategy."
                )
            check_dense_gradients(self.module, "servers")
            if not self._shares_steps:
                self.check_steps_apart(trainer)

    @override
    def print_summary(self) -> None:
        options, number = self._options, sum(p.numel() for p in self.module.parameters())
        bound = f", at most {options.max_staleness} updates apart" if options.max_staleness else ""
        rank_zero_info(
            f"Parameter server, {options.mode}: {self.world_size} workers{bound};"
            f" {options.num_servers} of these ranks serve {format_count(number)} parameters."
        )
        self.explain_batch_statistics()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        replica_checks.check_served_optimizers(self.optimizers, self._options.num_servers)

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        if not self.is_fitting:
            return
        replica_checks.check_no_loss_scale(self.precision_plugin)
        self._living, self._survivors = tuple(range(self.world_size)), {}
        there, back = (
            self.group(*self.mesh.sizes, purpose=purpose, timeout=NEVER)
            for purpose in ("push", "pull")
        )
        (optimizer,) = self.optimizers
        timeout, device = self.timeout_seconds, self.root_device
        self._session = ServerSession(
            self._options, optimizer, (there, back), device, timeout, self._decisions
        )
        server = self._session.server
        self._arrivals = () if server is None else server.arrivals
        self._has_servers = True

    @override
    def close_session(self) -> None:
        super().close_session()
        if self._session is not None:
            self._session.close(failed=not self.is_running)
            self._own_values = self._session.own_values
        self._session = None

    @override
    def interrupt(self, error: BaseException) -> None:
        if self._session is not None:
            self._session.interrupt(error)

    # --- steps -------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._session is not None:  # behind the hooks that change weights
            self._session.open()

    @override
    def update(self, optimizer: Optimizer, closure: Closure, apply: Closure) -> Any:
        session = self._session
        if session is None:  # behind a run
            return apply()
        session.check_optimizer(optimizer)
        replica_checks.check_no_step_hooks(optimizer)  # a hook may have added some

        def step(closure: Closure | None = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            session.push()
            lightning_internals.mark_optimizer_called(optimizer)
            return loss

        undo = replace_method(optimizer, "step", step)
        try:
            return apply()
        finally:
            undo()

    @override
    def drain(self) -> None:
        """Takes the newest weights, and rank 0's buffers and parameters that are not served.

        Collective: every rank must call it.

        Validation, checkpoints, and the ends of epochs and of training call it by themselves.
        """
        if self._session is None:
            return
        self.check_peers()
        if self.is_running and self._session.is_open:
            self._session.drain()
            self.share_buffers()
            own = [p for p in self.module.parameters() if not self._session.serves(p)]
            group = self.data_device_group
            # A hook may write into them, as into a teacher's; most are the same for ever.
            broadcast_state(differing(own, group), group)

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        self.drain()

    @override
    def check_optimizers_agree(self) -> None:
        super().check_optimizers_agree()
        if self.is_running and self._shares_steps:
            check_learning_rates(self.optimizers, self.data_group)

    # --- checkpoints -------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        session = self._session
        if session is not None:
            self._own_values = session.own_values
        with nullcontext() if session is None else session.lent_state():
            state = super().optimizer_state(optimizer)
            if not self._has_servers or not dist.is_initialized() or not self.is_running:
                return state
            # From the host: a pickled tensor of a GPU would go to the GPU of that number.
            part = map_tensors(Tensor.cpu, (state["state"], self._own_values))
            group = self.world_group
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.gather_object(part, parts if self.is_global_zero else None, dst=0, group=group)
        if not self.is_global_zero:
            return state
        replica_checks.check_servers_agree(optimizer, [own for _, own in parts if own is not None])
        whole = {key: value for own, _ in reversed(parts) for key, value in own.items()}
        return {**state, "state": whole}

    @override
    def load_extra_state(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_extra_state(checkpoint)
        self.drain()  # the learning rate finder loads while training; the next batch begins anew

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._session is not None:
            self._session.reload()

    # --- agreement without a collective in a step --------------------------------------------

    @override
    def stop_agreement(self) -> StopAgreement:
        if self._shares_steps or not self.is_fitting:
            return super().stop_agreement()
        self._decisions = Decisions()
        return ServerStop(self._decisions, self.world_group)

    @override
    def joint_decision(self, post: Callable[[int], PendingSum] | None = None) -> JointDecision:
        if self._shares_steps:
            return super().joint_decision(post)
        is_any = partial(self.reduce_boolean_decision, all=False)
        return ServerDecision(self._decisions, self.world_group, is_any)

    @override
    def _check_lengths(self) -> None:
        self.check_peers()
        super()._check_lengths()
        if not self._shares_steps and self._has_unknown_length:
            raise ValueError(
                f"mode={self._options.mode!r} needs training loaders of known length: workers that"
                " share no step cannot tell each other that data has ended. Define `__len__` on"
                " the dataset, or use mode='sync'."
            )

    # --- workers that are lost ---------------------------------------------------------------

    @property
    def _has_lost(self) -> bool:
        """Whether workers of this run were lost."""
        return len(self._living) not in (0, self.world_size)

    @override
    def outlives(self, failure: Failure) -> bool:
        is_lost = not failure.details and failure.unanswering is None
        is_server = failure.rank < self._options.num_servers or self._session is None
        return self._options.mode == "async" and is_lost and not is_server

    @override
    def check_peers(self) -> None:
        super().check_peers()
        if self._session is None or self._shares_steps or not self.is_running:
            return
        living = self._session.meet()
        if living != self._living:
            self._living, self._survivors, self._lengths = living, {}, None
            self._undo += (reduce_metrics_over(self.module.modules(), self.world_group),)

    @override
    def _group(
        self, backend: str, axes: tuple[str, ...], purpose: str, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        is_alone = all(self.mesh.sizes[axis] == 1 for axis in axes)
        if is_alone or not self._has_lost:
            return super()._group(backend, axes, purpose, timeout)
        key = backend, purpose
        if key not in self._survivors:
            timeout = timeout or timedelta(seconds=self.timeout_seconds)
            self._survivors[key] = dist.new_group(
                list(self._living), timeout, backend, use_local_synchronization=True
            )
        return self._survivors[key]

    @override
    def end_run(self, *, failed: bool) -> None:
        super().end_run(failed=failed or self._has_lost)

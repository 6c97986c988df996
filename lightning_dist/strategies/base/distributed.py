"""The base of all strategies of this package: one run of all ranks.

The base owns all that does not depend on how a model is sharded. It seeds random numbers by the
data rank and the batch, and ends a run if a rank fails or is asked to stop.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal, TypedDict, get_args
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DistributedSampler, IterableDataset
from typing_extensions import override

from lightning_dist.engine.common.device_group import NEVER, gather_objects
from lightning_dist.engine.common.environment import (
    EnvironmentCheck,
    compare_environments,
    read_environment,
)
from lightning_dist.engine.common.mesh_shape import DATA_AXES
from lightning_dist.engine.common.names import check_choice, nearest
from lightning_dist.engine.comms.failures.parent_watch import ending_with_launcher
from lightning_dist.engine.comms.failures.peer_failure import Failure
from lightning_dist.engine.comms.replica_channel import open_channel
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.comms.votes import JointDecision, PendingSum, StopAgreement
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart
from lightning_dist.engine.precision.overflow import AllReducedOverflow, Overflow
from lightning_dist.engine.tensors.rng import seed_all, share_random_state
from lightning_dist.strategies.base import lightning_internals, lightning_loaders
from lightning_dist.strategies.base.callback_order import add_first_callback, mute_checkpoints
from lightning_dist.strategies.base.ending.run_guard import RunGuard
from lightning_dist.strategies.base.loaders.replica_loaders import ReplicaLoaders
from lightning_dist.strategies.base.precision_plugin import half_precision_of
from lightning_dist.strategies.base.process_mesh import ProcessMesh
from lightning_dist.strategies.base.rank_view import RankView, predict_memory_alone

Read = Literal["first", "each"]
"""Which ranks of a data replica read its batches."""


class RunArguments(TypedDict, total=False):
    """The arguments that all strategies have, besides their own.

    Those without a description are Lightning's, as for any of its strategies.

    Attributes:
        timeout_s: Seconds that a rank waits for another before it gives up; 1800 by default.
        save_full: Whether to write one ordinary ``.ckpt`` file, or else a directory of shards. By
            default, None, the file is written if a rank holds the whole model.
        async_save: Whether a thread writes checkpoints, from a copy in host memory, while training
            goes on.
        read: Which ranks of a data replica read its batches. By default the ``"first"`` sends them
            to the others, so that a run draws its data as one device would. With ``"each"``, all
            ranks of a replica must draw the same.
        check_environment: What to do at the start if processes have other versions, variables or
            scripts than rank 0, whose value of this argument counts: ``"warn"``, the default,
            ``"error"`` or ``"off"``.
        process_group_backend: ``"gloo"`` or ``"nccl"``, for what is on the device; None takes the
            device's own. Control messages always go over gloo.
    """

    timeout_s: float
    save_full: bool | None
    async_save: bool
    read: Read
    check_environment: EnvironmentCheck
    process_group_backend: str | None
    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None


class DistributedStrategy(ProcessMesh):
    """Base class; see the module's docstring.

    The arguments are those of :class:`.RunArguments`.

    Attributes:
        seed: Base of the random numbers; the same on all ranks.
    """

    def __init__(
        self,
        save_full: bool | None = None,
        read: Read = "first",
        check_environment: EnvironmentCheck = "warn",
        **arguments: Any,
    ) -> None:
        for name in arguments:
            if name not in RunArguments.__annotations__:
                kind = type(self)
                known = [*inspect.signature(kind).parameters, *RunArguments.__annotations__]
                raise TypeError(f"{kind.__name__} has no argument {name!r}.{nearest(name, known)}")
        super().__init__(**arguments)
        check_choice("read", read, get_args(Read))
        check_choice("check_environment", check_environment, get_args(EnvironmentCheck))
        self._read = read
        self._environment_check = check_environment
        self._loaders: ReplicaLoaders | None = None
        self._save_full = save_full
        self._guard: RunGuard | None = None
        self._is_stop_due = False  # a stop that comes at a run's very end is left to the next run
        self.seed = 0
        self._undo_callbacks = ExitStack()

    # --- data --------------------------------------------------------------------------------

    @property
    def num_readers(self) -> int:
        """Ranks that read batches by themselves: one of each data replica, or all ranks."""
        return self.mesh.data_size if self._read == "first" else self.mesh.world_size

    @property
    def is_reading(self) -> bool:
        """Whether this rank is reading a batch for the others of its data replica."""
        return self._loaders is not None and self._loaders.is_reading

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Lets the first rank of each data replica read for the others.

        Raises:
            ValueError: A user's sampler shares the samples out among other ranks than replicas.
        """
        self._check_sampler(dataloader)
        if self._loaders is None:
            return self._read_here(dataloader)
        if self._loaders.channel.is_reader:
            dataloader = self._read_here(dataloader)
        return self._loaders.wrap(dataloader)

    def _check_sampler(self, dataloader: object) -> None:
        sampler = getattr(dataloader, "sampler", None)
        replicas = self.distributed_sampler_kwargs["num_replicas"]
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != replicas:
            raise ValueError(
                f"A loader has a DistributedSampler for {sampler.num_replicas} replicas, and there"
                f" {'is' if replicas == 1 else 'are'} {replicas}, for ranks of one replica get the"
                " same samples. Leave the sampler out, so that the Trainer makes it, or pass it"
                " `**trainer.strategy.distributed_sampler_kwargs`."
            )

    def _read_here(self, dataloader: object) -> object:
        """Seeds workers by their replica; Lightning would seed them by rank."""
        if self.module.trainer.training:
            lightning_loaders.set_sampler_epoch(self.module.trainer, dataloader)
        if os.environ.get("PL_SEED_WORKERS", "0") != "0":
            # An iterable dataset may share its samples out by random numbers of its workers.
            is_iterable = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
            data_index = 0 if is_iterable else self.mesh.data_index(self.global_rank)
            if getattr(dataloader, "worker_init_fn", dataloader) is None:
                init = partial(pl_worker_init_function, rank=data_index)
                setattr(dataloader, "worker_init_fn", init)  # noqa: B010
        return self.share_order(dataloader)

    def share_order(self, dataloader: object) -> object:
        """Returns a loader whose sampling order is the same on all data replicas."""
        return dataloader

    # --- processes ---------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        with ending_with_launcher():
            self._meet()
        self.join_mesh()
        self._agree_on_start()

    def join_mesh(self) -> None:
        """Opens what depends on the sizes of the mesh. Collective: every rank must call it."""
        if self._read == "first" and self.mesh.data_size < self.mesh.world_size:
            group = self.group("pp", "tp", purpose="batches", timeout=NEVER)
            channel = open_channel(group, self.root_device, self.timeout_seconds)
            self._loaders = ReplicaLoaders(channel)
        if self.mesh.data_size == 1:
            lightning_loaders.keep_users_samplers(self.module.trainer)
        share_random_state(self.world_group, self.root_device)  # `setup` may divide a dataset
        self.device_group(*DATA_AXES)  # here all ranks are; a value may be logged on some alone

    def _agree_on_start(self) -> None:
        """Takes rank 0's seed, and compares the environments, all in one collective."""
        self.check_peers()
        own = read_environment()
        start = (torch.initial_seed(), self._environment_check, own.digest)
        starts = gather_objects(start, self.world_group)
        self.seed, check, digest = starts[0]
        if check == "off" or all(other == digest for _, _, other in starts):
            return
        table = compare_environments(gather_objects(own, self.world_group))
        text = (
            f"The processes of this run have different environments:\n\n{table}\n\nThey may hang,"
            " or train on different code. Make them the same, or give the strategy"
            " check_environment='off'."
        )
        if check == "error":
            raise ValueError(text)
        rank_zero_warn(text)

    def _meet(self) -> None:
        self._init_process_group()
        self.begin_run()
        self._guard = RunGuard(
            self.module.trainer,
            ring_group=self.group(*self.mesh.sizes, purpose="failures", timeout=NEVER),
            stop=self.stop_agreement(),
            interrupt=self._wake,
            is_stop_due=self._is_stop_due,
            notes=self.make_notes(self.world_group),
            steps_are_local=lambda: self.holds_whole_model,
            timeout_seconds=self.timeout_seconds,
            outlives=self.outlives,
        )
        listener = LambdaCallback(on_exception=lambda _, __, error: self._report(error))
        self._undo_callbacks.callback(add_first_callback(self.module.trainer, listener))

    @property
    def holds_whole_model(self) -> bool:
        """Whether each rank has the whole model."""
        return self.mesh.pp == 1 and self.mesh.has_whole_layers

    def view(self) -> RankView:
        """Returns the view of this rank for callbacks, from ``setup_environment`` on."""
        axes = tuple(self.mesh.sizes)
        return RankView(self.mesh, lambda p: self.group(*axes, purpose=p), self.predict_memory)

    def predict_memory(self, part: TrainedPart, accumulates: bool) -> RankMemory | None:
        """Returns the planner's prediction of this rank's memory; None without a formula."""
        return predict_memory_alone(self.mesh.world_size, part, accumulates)

    def make_notes(self, group: dist.ProcessGroup) -> RankNotes:
        """Creates the notes of the ranks of a group. Collective: every rank must call it."""
        name = f"lightning_dist/{self.broadcast(uuid4().hex)}"
        ranks = dist.get_process_group_ranks(group)
        return RankNotes(lightning_internals.default_store(), name, self.global_rank, ranks)

    def _wake(self, error: BaseException) -> None:
        if self._loaders is not None:
            self._loaders.channel.interrupt(error)
        self.interrupt(error)

    @property
    def batch_index(self) -> int:
        """Index of the training batch at hand, counted over epochs and resumed runs alike."""
        return self.module.trainer.fit_loop.epoch_loop.total_batch_idx

    def seed_data_rank(self, *, reading: bool, early: bool = False) -> None:
        """Seeds this rank's generators by the batch at hand, if ranks read different data.

        To be called at the start of each training step, and with ``reading`` before each batch of a
        training loader is read and when its iterator is made. The numbers depend on nothing
        else, so a resumed run draws the same. The state before is not restored: the backward
        may draw too, where it recomputes activations.

        Args:
            reading: Whether the next batch is read, or a step begins.
            early: Whether the batch is read, or workers are seeded, while the iterator is made. The
                batch that is read next has the same number, and must not repeat the draws.
        """
        if self.mesh.data_size > 1:
            data_index = self.mesh.data_index(self.global_rank)
            name = (self.seed, data_index, self.batch_index, int(reading) + int(early))
            seed_all(*name, device=self.root_device)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        half = half_precision_of(self.precision_plugin)
        if half is not None and half.loss_scale is not None:
            half.overflow = self.overflow()

    def overflow(self) -> Overflow:
        """Creates the vote on skipping a step. Collective: every rank must call it."""
        return AllReducedOverflow(self.device_group(*self.mesh.sizes))

    # --- how a run ends ----------------------------------------------------------------------

    @property
    @override
    def is_running(self) -> bool:
        return super().is_running and (self._guard is None or self._guard.is_sound)

    @property
    def stop_lag(self) -> int:
        """By how many batches one rank can be ahead of another."""
        return 1

    def stop_agreement(self) -> StopAgreement:
        """Creates this rank's part in the decision to stop. Collective: every rank must call it."""
        return StopAgreement(self.world_group, self.stop_lag)

    def joint_decision(self, post: Callable[[int], PendingSum] | None = None) -> JointDecision:
        """Creates this rank's part in a recurring decision. Collective: every rank must call it."""
        return JointDecision(self.world_group, self.stop_lag, post)

    @property
    def has_joint_statistics(self) -> bool:
        """Whether BatchNorm normalises by the batches of all data replicas."""
        return self._layer_sync is not None

    def outlives(self, failure: Failure) -> bool:
        """Returns whether this rank goes on behind another one's failure; called on a thread."""
        return False

    @property
    def guard(self) -> RunGuard:
        """The guard that ends all ranks together, from ``setup_environment`` to ``teardown``."""
        assert self._guard is not None
        return self._guard

    @override
    def check_peers(self) -> None:
        """Raises another rank's failure, if there is one and this rank's run has not ended."""
        if self._guard is not None:
            self._guard.check_peers()

    def file_work(self, activity: str) -> AbstractContextManager[None]:
        """Returns a context manager that names work on files, should the work not end."""
        return nullcontext() if self._guard is None else self._guard.file_work(activity)

    def interrupt(self, error: BaseException) -> None:
        """Wakes this rank's main thread where it waits for another rank."""

    def _report(self, exception: BaseException) -> None:
        """Reports an exception to the other ranks, before callbacks handle it and may save."""
        if self._guard is None:
            return
        self.annotate(exception)
        self._guard.report(exception)
        if not self.is_running:
            self._undo_callbacks.callback(mute_checkpoints(self.module.trainer))

    def annotate(self, exception: BaseException) -> None:
        """Adds a note to an error of which the user could not tell what to do."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._guard is not None:
            self._guard.report(exception)
            self._guard.leave()

    def wait_for_save(self) -> None:
        """Waits for a checkpoint that is being written, and leaves its errors for later."""

    def close_session(self) -> None:
        """Closes the parts that ``setup`` opened. Collective: every sound rank must call it."""

    @override
    def teardown(self) -> None:
        if self._guard is not None:
            with self._guard.closing():
                self.wait_for_save()
                self.barrier("teardown")  # else a fast rank would take a slow one for lost
                self.close_session()
                loaders, self._loaders = self._loaders, None
                if loaders is not None:
                    loaders.channel.close()
            self.end_run(failed=not self._guard.is_sound)
            self._is_stop_due = self._guard.is_stop_due
            self._guard = None
            self._undo_callbacks.close()
        super().teardown()

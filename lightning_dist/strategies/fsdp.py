"""Sharded data parallelism: no rank holds the whole model for longer than it computes with it.

FSDP2 does the work: parameters, gradients and optimizer state are ``DTensor`` shards, and a unit's
parameters are gathered for its forward and backward. What this strategy adds to it and to
Lightning's own: policies that choose the units, models larger than one rank that begin with the
weights a single device would give them, accumulation that does not send, exact clipping,
checkpoints that every other layout reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_dist.deferred.tape import Tape
from lightning_dist.deferred_init import deferred_init, named_tensors
from lightning_dist.device_mesh import build_data_mesh
from lightning_dist.mesh import MeshShape
from lightning_dist.sharding import ShardingOptions, fill
from lightning_dist.shards import is_spread
from lightning_dist.strategies import data_parallel_checks
from lightning_dist.strategies import fsdp_checks as checks
from lightning_dist.strategies.clipping import clip_by_global_norm
from lightning_dist.strategies.data_parallel import DataParallelStrategy
from lightning_dist.strategies.distributed import StartMethod
from lightning_dist.strategies.fsdp_options import ActivationCheckpointing, Offload, ReduceDtype
from lightning_dist.strategies.random_state import first_ranks_numbers
from lightning_dist.strategies.replicas import broadcast_state
from lightning_dist.strategies.sharded_module import ShardedModule, UnitOptions
from lightning_dist.strategies.whole_model_checks import check_callbacks, check_optimizers
from lightning_dist.wrap import WrapPolicy, parse_policy
from lightning_dist.wrap_summary import WrapSummary


class FSDPStrategy(DataParallelStrategy):
    """Trains one model, or a few replicas of it, sharded over many ranks.

    Args:
        wrap: Which modules become units: ``"auto"`` (the block that the model repeats),
            ``"manual"``, or a policy of :mod:`lightning_dist.wrap`.
        shard_size: Ranks that share one replica; fewer than all make several replicas (HSDP).
        reshard_after_forward: Free gathered parameters between forward and backward: yes, no, or
            down to so many ranks. ``"auto"`` does so for all but the root.
        offload: ``"cpu"`` keeps shards, gradients and optimizer state in host memory.
        activation_checkpointing: Compute the units' activations again in the backward: ``"full"``,
            ``"selective"`` (all but matrix products and attention), or of these classes.
        reduce_dtype: Of gradients on their way, with ``precision="bf16-mixed"`` or ``"16-mixed"``.
        sync_every_microstep: With ``accumulate_grad_batches``, reduce gradients in each backward,
            for memory: between micro-steps a rank holds a shard of them, not all.
        meta_init: Build in ``configure_model`` without memory, and give values shard by shard.
        compile: Compile the units' forwards with ``torch.compile``.
        find_unused_parameters: Allow steps that do not use all parameters.
        compression: Only ``"none"``; other strategies have more.
        timeout_s: Seconds that a rank waits for another before it gives up.
        save_full: Write one ordinary ``.ckpt`` file instead of a directory of shards.
        accelerator: As for any Lightning strategy.
        parallel_devices: As for any Lightning strategy.
        cluster_environment: As for any Lightning strategy.
        checkpoint_io: As for any Lightning strategy.
        precision_plugin: As for any Lightning strategy.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None takes the device's own.
        start_method: Only ``"popen"``, which runs the script once per device.

    Raises:
        ValueError: An argument is unknown.
    """

    def __init__(
        self,
        wrap: str | WrapPolicy = "auto",
        shard_size: int | Literal["auto"] = "auto",
        reshard_after_forward: bool | int | Literal["auto"] = "auto",
        offload: Offload = "none",
        activation_checkpointing: ActivationCheckpointing | list[str] = "none",
        reduce_dtype: ReduceDtype = "float32",
        sync_every_microstep: bool = False,
        meta_init: bool = True,
        compile: bool = False,
        find_unused_parameters: bool = False,
        compression: Literal["none"] = "none",
        timeout_s: float = 1800.0,
        save_full: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
            start_method=start_method,
            save_full=save_full,
        )
        checks.check_arguments(
            offload, reduce_dtype, activation_checkpointing, compile, compression
        )
        self._policy = parse_policy(wrap)
        self._shard_size = shard_size
        self._reshard_after_forward = reshard_after_forward
        self._offload = offload
        self._activation_checkpointing = activation_checkpointing
        self._reduce_dtype = getattr(torch, reduce_dtype)
        self._sync_every_microstep = sync_every_microstep
        self._meta_init = meta_init
        self._compile = compile
        self._find_unused_parameters = find_unused_parameters
        self._device_mesh: DeviceMesh | None = None
        self._tape: Tape | None = None
        self._sharded: ShardedModule | None = None
        self._is_accumulating = False

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        size = world_size if self._shard_size == "auto" else self._shard_size
        checks.check_shard_size(size, world_size)
        checks.check_reshard(self._reshard_after_forward, size)
        return MeshShape(dp_replicate=world_size // size, dp_shard=size)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of all ranks: ``dp_shard``, behind ``dp_replicate`` with several replicas.

        For a ``configure_model`` that calls ``fully_shard`` itself (``wrap="manual"``).
        """
        if self._device_mesh is None:
            self._device_mesh = build_data_mesh(self.mesh, self.root_device.type)
        return self._device_mesh

    def describe(self) -> WrapSummary:
        """Tells which modules are units, their sizes, and the most that is whole at one time.

        Known once a run has been set up.
        """
        return self.sharded.summary

    # --- the model ---------------------------------------------------------------------------

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Builds what ``configure_model`` makes without memory, with the first rank's numbers."""
        with first_ranks_numbers(self.group(*self.mesh.sizes)):
            if self._policy.is_manual or not self._meta_init:
                yield
                return
            with deferred_init() as self._tape:
                yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            check_callbacks(trainer)
        if self._sharded is None or self._sharded.module is not self.module:
            self._sharded = self._shard()
        self.hook_into(trainer)
        if is_fitting:
            rank_zero_info(str(self.describe()))
            self._undo += (clip_by_global_norm(self.precision_plugin),)
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            self.name_optimizer_groups()
        self.setup_precision_plugin()

    @override
    @contextmanager
    def summarised_module(self) -> Iterator[None]:
        # Only a step gathers all parameters, and an example's forward is none.
        example, self.module.example_input_array = self.module.example_input_array, None
        try:
            yield
        finally:
            self.module.example_input_array = example

    def _shard(self) -> ShardedModule:
        everyone = self.group(*self.mesh.sizes)
        data_parallel_checks.check_module(self.module, everyone)
        checks.check_shardable(self.module, self._policy.is_manual)
        tensors = named_tensors(self.module)  # before others are put in their place
        self.model = self.precision_plugin.convert_module(self.module)
        self.synchronise_layers()
        state = [*self.module.parameters(), *self.module.buffers()]
        broadcast_state([t for t in state if not t.is_meta and not is_spread(t)], everyone)
        sharded = ShardedModule(
            self.module,
            self._policy,
            self.device_mesh,
            self._sharding_options(),
            UnitOptions(self._activation_checkpointing, self._compile),
        )
        if self._tape is not None:
            tape, self._tape = self._tape, None
            deferred = [name for name, tensor in tensors.items() if tensor.is_meta]
            fill(self.module, deferred, lambda n: tape.materialize(tensors[n]), self.root_device)
        if self._offload == "none":
            self.module.to(self.root_device)
        return sharded

    def _sharding_options(self) -> ShardingOptions:
        reshard = self._reshard_after_forward
        precision = self.precision_plugin
        half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        param_dtype = half[precision.precision] if isinstance(precision, MixedPrecision) else None
        return ShardingOptions(
            reshard_after_forward=None if reshard == "auto" else reshard,
            param_dtype=param_dtype,
            reduce_dtype=None if param_dtype is None else self._reduce_dtype,
            offload=self._offload == "cpu",
        )

    @property
    def sharded(self) -> ShardedModule:
        """The user's module as it is spread; exists once a run has been set up."""
        assert self._sharded is not None, "the model has not been sharded yet"
        return self._sharded

    @override
    def drain(self) -> None:
        """Makes the replicas' buffers (running statistics) the first rank's; all must call it.

        Validation, checkpoints and the end of training do so by themselves.
        """
        if self.is_running:
            self.sharded.reshard()
            self.share_buffers()

    @override
    def close_session(self) -> None:
        super().close_session()
        if self._sharded is not None and not self.is_running:
            self._sharded.recover()

    @property
    @override
    def process_groups(self) -> list[dist.ProcessGroup | None]:
        mesh = [] if self._device_mesh is None else self._device_mesh.get_all_groups()
        return [*super().process_groups, *mesh]

    # --- steps -------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seed_data_rank(reading=False)
        with self.precision_plugin.train_step_context():
            return self.sharded.train(self.module.training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.sharded.evaluate(self.module.validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.sharded.evaluate(self.module.test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.sharded.evaluate(self.module.predict_step, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._is_accumulating and not self._find_unused_parameters:
            data_parallel_checks.check_gradients(self.module)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._sync_every_microstep:
            yield
            return
        self._is_accumulating = True
        try:
            with self.sharded.no_sync():
                yield
        finally:
            self._is_accumulating = False

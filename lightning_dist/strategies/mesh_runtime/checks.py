"""Refuse modules, arguments and precisions that do not go with a mesh.

Each check raises ``ValueError`` with the reason, on all ranks alike, before any waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, get_args

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.parallelize.shard_config import Offload, ShardConfig, Sharded
from lightning_dist.engine.sharding.fully_shard import is_indivisible
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.ties import Tie
from lightning_dist.engine.tensors.dtensor import crashes_in_gathers, is_dtensor
from lightning_dist.engine.tensors.patch import gradient_hooks_of, has_gradient_hooks


def keeps_parameters(
    shard: str, reshard_after_forward: bool | int | str, sync_every_microstep: bool
) -> bool:
    """Returns whether gathered parameters are kept from the forward to the backward.

    Raises:
        ValueError: There is no such ``shard``, or another argument asks for something else.
    """
    if shard not in get_args(Sharded):
        raise ValueError(f"shard={shard!r} is unknown; use one of {get_args(Sharded)}.")
    if shard == "parameters":
        return False
    if reshard_after_forward != "auto" or sync_every_microstep:
        raise ValueError(
            f"shard={shard!r} sets reshard_after_forward and sync_every_microstep by itself, and"
            f" these are {reshard_after_forward!r} and {sync_every_microstep}. Leave them out, or"
            " leave shard out."
        )
    return True


def check_reshard(reshard_after_forward: bool | int | str, shard_size: int) -> None:
    """Checks that parameters can be resharded to so many ranks after the forward."""
    if isinstance(reshard_after_forward, bool | str):
        return
    divisors = [size for size in range(2, shard_size) if shard_size % size == 0]
    if reshard_after_forward not in divisors:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the shard size of"
            f" {shard_size}, and be neither 1 nor all of it; use True, False"
            + (f" or one of {divisors}." if divisors else ".")
        )


def check_hooks(module: pl.LightningModule) -> None:
    """Checks that no hook waits for the gradient of a parameter that FSDP2 replaces."""
    for name, parameter in module.named_parameters():
        before, behind = gradient_hooks_of(parameter)
        if before or (behind and not is_dtensor(parameter)):
            _refuse_hook(name, "which its shards or replicas would not call")


class HookCheck:
    """Refuses hooks that are added to sharded parameters, and would not run as on one device.

    Args:
        module: The sharded module, outside of any step.
        reduces_each: Whether each backward of an update reduces gradients.
    """

    def __init__(self, module: pl.LightningModule, *, reduces_each: bool) -> None:
        self._module = module
        self._reduces_each = reduces_each
        named = list(module.named_parameters())
        self._shards = [(name, p) for name, p in named if not is_indivisible(p)]
        self._left_whole = [(name, p) for name, p in named if is_indivisible(p)]
        self._gathered: list[tuple[str, nn.Parameter]] | None = None

    def check(self, *, accumulating: bool) -> None:
        """Checks the hooks of all parameters, between a step's forward and its backward.

        Args:
            accumulating: Whether more gradients come before the update.
        """
        if self._gathered is None:
            # The parameters that the root has gathered for a step; the same tensors in each step.
            own = {id(parameter) for _, parameter in (*self._shards, *self._left_whole)}
            found = self._module.named_parameters()
            self._gathered = [(name, p) for name, p in found if id(p) not in own]
        for name, parameter in self._shards:
            if has_gradient_hooks(parameter):
                before, behind = gradient_hooks_of(parameter)
                if before:
                    _refuse_hook(name, "which no backward calls, for it is sharded")
                if behind and accumulating and not self._reduces_each:
                    _refuse_hook(
                        name,
                        "which each backward would call on one device, and sharded gradients are"
                        " complete once for several; `sync_every_microstep=True` completes each",
                    )
        hooked = [name for name, p in self._left_whole if has_gradient_hooks(p)]
        for name in [*hooked, *(n for n, p in self._gathered if gradient_hooks_of(p)[0])]:
            _refuse_hook(name, "which sees this rank's gradient, before ranks combine theirs")


def _refuse_hook(name: str, reason: str) -> NoReturn:
    raise ValueError(
        f"The parameter {name!r} has a hook (`register_hook` or"
        f" `register_post_accumulate_grad_hook`), {reason}. Change"
        " gradients in `on_before_optimizer_step` or `configure_gradient_clipping`, where"
        " `parameter.grad` is a DTensor; or use DDPStrategy."
    )


def check_shardable(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that a module can be sharded."""
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    # If one unit is the whole module, an earlier run's unit is around the module, not in it.
    if not is_manual and (is_sharded or any(is_dtensor(p) for p in module.parameters())):
        raise ValueError(
            "The module is sharded already, as part of another LightningModule that was trained, or"
            " by its own `configure_model`. Go on with that LightningModule, load its checkpoint"
            " into a new one, or pass wrap='manual'."
        )
    if is_manual and not is_sharded:
        raise ValueError(
            "wrap='manual' expects that `configure_model` has called `fully_shard`, and no module"
            " is sharded. Call it there with `mesh=self.trainer.strategy.device_mesh`, or use"
            " wrap='auto'."
        )


def check_automatic(module: pl.LightningModule) -> None:
    """Checks that no step of a module calls backward by itself."""
    if not module.automatic_optimization:
        raise ValueError(
            "Manual optimization calls backward inside of the step, where ranks that share layers,"
            " or have other ones, cannot complete the gradients. Use automatic optimization,"
            " FSDPStrategy or DDPStrategy."
        )


def check_optimization(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that a module optimizes as it did when it was sharded."""
    if not is_manual and not module.automatic_optimization:
        raise ValueError(
            "The module was sharded for automatic optimization, and `automatic_optimization` is"
            " False now. Set it in `__init__`, or load a checkpoint into a new module."
        )


def check_half_precision(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that shards can be gathered in half precision, as ``MixedPrecision`` asks."""
    if is_manual:
        raise ValueError(
            "MixedPrecision says what shards are gathered as, and wrap='manual' leaves that to"
            " `configure_model`. Use wrap='auto', or a `mp_policy` there and no callback."
        )
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"The parameters {own} of the LightningModule itself would be gathered in half"
            " precision, and its steps use them beside a loss in fp32. Put them into a module"
            " of their own."
        )


def check_sizes(pp: object, dp_replicate: object, dp_shard: object, tp: object) -> None:
    """Checks the sizes of the axes, each by itself."""
    for name, size in (("pp", pp), ("dp_replicate", dp_replicate), ("tp", tp)):
        check_count(name, size)
    if dp_shard != "auto":
        check_count("dp_shard", dp_shard, instead="'auto'")


def check_gathers(backend: str, device_type: str, tp_size: int) -> None:
    """Checks that tensor-parallel layers can gather tensors of a device over a backend."""
    if tp_size > 1 and crashes_in_gathers(backend, device_type):
        raise ValueError(
            f"process_group_backend={backend!r} with tp_size={tp_size} on a {device_type!r} device:"
            " layers all-gather DTensors, with which torch crashes there (pytorch#152645). Use"
            " process_group_backend=None, for the device's own, or strategies without tp."
        )


def check_mesh(pp: int, tp: int, pipeline: PipelineConfig, shard: ShardConfig) -> None:
    """Checks that a pipeline goes with the rest of the mesh."""
    if pipeline.asynchronous:
        raise ValueError(
            f"schedule={pipeline.schedule!r} keeps older versions of a stage's weights, each of"
            " which would have to be sharded and gathered by itself. Use schedule='1f1b' here, or"
            " PipelineStrategy(schedule='pipedream'), whose replicas hold whole stages."
        )
    if pipeline.partition == "profile":
        raise ValueError(
            "partition='profile' moves layers when it has measured, and here each rank has shards"
            " of its layers, or pieces. Use partition='parameters' or the layers per stage, or"
            " PipelineStrategy, whose replicas hold whole stages."
        )
    if pipeline.is_traced:
        raise ValueError(
            f"layers={pipeline.layers!r} runs the operations of a module without calling its parts,"
            " and parameters are gathered and resharded where parts are called. Use"
            " PipelineStrategy(layers='trace'), whose replicas hold whole stages."
        )
    if (pp > 1 or tp > 1) and shard.policy.is_manual:
        raise ValueError(
            f"wrap='manual' with pp={pp}, tp={tp}: `configure_model` would shard layers before they"
            " are shared out among stages or sharded. Use wrap='auto', or another policy."
        )


def check_local(local: LocalConfig, dp_replicate: int) -> None:
    """Checks that there are replicas that can step by themselves."""
    if local.averages_weights and dp_replicate == 1:
        raise ValueError(
            f"local={local} averages the weights of replicas, and dp_replicate=1 leaves one. Use"
            " dp_replicate=2 or more, or leave local out."
        )


def check_fragments(local: LocalConfig, ties: Sequence[Tie]) -> None:
    """Checks that the copies of a parameter on several stages are averaged together."""
    if local.fragments > 1 and ties:
        shared = [name for names in ties[0].names.values() for name in names]
        raise ValueError(
            f"fragments={local.fragments}: each stage averages its fragments in its own turns, and"
            f" {shared} are one parameter, whose copies would then differ. Use fragments=1."
        )


def check_offload(offload: Offload, shape: MeshShape) -> None:
    """Checks that there are shards to keep in host memory."""
    if offload != "none" and shape.data_size == 1 and shape.world_size > 1:
        raise ValueError(
            f"offload={offload!r} keeps shards in host memory, and with dp_replicate=1 x dp_shard=1"
            " nothing is sharded: stages and tensor-parallel ranks compute with what they hold."
            " Use dp_shard=2 or more, or leave offload out."
        )


def check_dry_run(is_manual: bool, optimizer_states_per_parameter: int) -> None:
    """Checks the arguments of a dry run."""
    if is_manual:
        raise ValueError(
            "wrap='manual': `configure_model` shards on a mesh of real processes, which a dry run"
            " has none of. Use wrap='auto', or another policy."
        )
    if optimizer_states_per_parameter < 0:
        raise ValueError(
            f"optimizer_states_per_parameter={optimizer_states_per_parameter} cannot be below zero;"
            " it is 2 for AdamW, 1 for momentum, 0 for plain SGD."
        )


def check_precision(precision: str, tp_size: int) -> None:
    """Checks that tensor-parallel ranks skip the same steps."""
    if precision == "16-mixed" and tp_size > 1:
        raise ValueError(
            f"precision='16-mixed' with tp_size={tp_size}: each rank's loss scaler looks at its own"
            " part of the gradients, and ranks would skip different steps. Use 'bf16-mixed'."
        )


def check_anomaly(is_asked: bool, tp_size: int) -> None:
    """Checks that no gradient of a tensor-parallel layer is searched for nan by autograd."""
    if is_asked:
        raise ValueError(
            f"detect_anomaly=True with tp_size={tp_size}: autograd would ask each gradient whether"
            " it is nan, which a DTensor cannot answer. Look for it in `on_after_backward`, or"
            " train a few steps without tensor parallelism."
        )

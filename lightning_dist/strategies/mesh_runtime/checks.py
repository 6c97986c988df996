"""Refuse modules, arguments and precisions that do not go with shards, or with a mesh.

Each function raises ``ValueError`` with the reason, on all ranks alike, before any rank waits for
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import lightning.pytorch as pl
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.common.names import check_choice, check_count
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.parallelize.shard_config import ShardConfig, Sharded
from lightning_dist.engine.sharding.fully_shard import is_indivisible
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensors.dtensor import is_dtensor


def check_mesh(
    sizes: Mapping[str, Any], pipeline: PipelineConfig, shard: ShardConfig, local: LocalConfig
) -> None:
    """Checks the sizes of the axes, each by itself, and what goes with a mesh."""
    for name, size in sizes.items():
        if name != "dp_shard" or size != "auto":
            check_count(name, size, instead="'auto'" if name == "dp_shard" else "")
    if pipeline.asynchronous:
        raise ValueError(
            f"schedule={pipeline.schedule!r} keeps older versions of weights, each of which would"
            " have to be sharded and gathered by itself. Use schedule='1f1b', or"
            " PipelineStrategy(schedule='pipedream')."
        )
    if pipeline.partition == "profile":
        raise ValueError(
            "partition='profile' moves layers when it has measured, and here they are in shards."
            " Use partition='parameters' or the layers per stage, or PipelineStrategy."
        )
    if (sizes["pp"] > 1 or sizes["tp"] > 1) and shard.policy.is_manual:
        raise ValueError(
            f"wrap='manual' with pp={sizes['pp']}, tp={sizes['tp']}: `configure_model` would shard"
            " layers before ranks share them out. Use wrap='auto', or another policy."
        )
    if local.averages_weights and sizes["dp_replicate"] == 1:
        raise ValueError(
            f"local={local} averages the weights of replicas, and dp_replicate=1 leaves one. Use"
            " dp_replicate=2 or more, or leave local out."
        )


def keeps_parameters(
    shard: str, reshard_after_forward: bool | int | str, sync_every_microstep: bool
) -> bool:
    """Returns whether gathered parameters are kept from the forward to the backward.

    Raises:
        ValueError: There is no such ``shard``, or another argument asks for something else.
    """
    check_choice("shard", shard, get_args(Sharded))
    if shard == "parameters":
        return False
    if reshard_after_forward != "auto" or sync_every_microstep:
        raise ValueError(
            f"shard={shard!r} sets reshard_after_forward and sync_every_microstep by itself: these"
            f" are {reshard_after_forward!r} and {sync_every_microstep}. Leave them or shard out."
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
            f" {shard_size}, and be neither 1 nor all of it; use one of {[True, False, *divisors]}."
        )


def check_shardable(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that a module can be sharded."""
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    # If one unit is the whole module, an earlier run's unit is around the module, not in it.
    if not is_manual and (is_sharded or any(is_dtensor(p) for p in module.parameters())):
        raise ValueError(
            "The module is sharded already, as part of another LightningModule or by its own"
            " `configure_model`. Load a checkpoint into a new one, or pass wrap='manual'."
        )
    if is_manual and not is_sharded:
        raise ValueError(
            "wrap='manual', and `configure_model` has sharded no module. Call `fully_shard` there,"
            " with `mesh=self.trainer.strategy.device_mesh`, or use wrap='auto'."
        )


def check_automatic(module: pl.LightningModule) -> None:
    """Checks that no step of a module calls backward by itself."""
    if not module.automatic_optimization:
        raise ValueError(
            "Manual optimization calls backward inside of the step, where ranks that share layers"
            " cannot complete gradients. Use automatic optimization, FSDPStrategy or DDPStrategy."
        )


def check_half_precision(module: pl.LightningModule, *, is_manual: bool, has_stages: bool) -> None:
    """Checks that shards can be gathered in half precision, as ``MixedPrecision`` asks.

    A step's own parameters are not gathered if stages have them, or if they cannot be divided.
    """
    if is_manual:
        raise ValueError(
            "With wrap='manual' `configure_model` decides what shards are gathered as. Give a"
            " `mp_policy` there in place of MixedPrecision, or use wrap='auto'."
        )
    named = () if has_stages else module.named_parameters(recurse=False)
    own = [name for name, parameter in named if not is_indivisible(parameter)]
    if own:
        raise ValueError(
            f"MixedPrecision would gather the parameters {own} of the LightningModule itself in"
            " half precision for its whole step. Put them into a module of their own."
        )


def check_precision(precision: str, tp_size: int) -> None:
    """Checks that tensor-parallel ranks skip the same steps."""
    if precision == "16-mixed" and tp_size > 1:
        raise ValueError(
            f"precision='16-mixed' with tp_size={tp_size}: ranks scale the loss by their own parts"
            " of the gradients, and would skip different steps. Use 'bf16-mixed'."
        )


def check_anomaly(is_asked: bool, tp_size: int) -> None:
    """Checks that no gradient of a tensor-parallel layer is searched for nan by autograd."""
    if is_asked:
        raise ValueError(
            f"detect_anomaly=True with tp_size={tp_size}: autograd cannot look for nan in a"
            " DTensor. Look for it in `on_after_backward`, or train some steps without tp."
        )

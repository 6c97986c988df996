"""Refuse modules, arguments and precisions that do not go with a mesh.

Each check raises ``ValueError`` with the reason, on all ranks alike, before any waits for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from inspect import signature
from typing import Any, NoReturn, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import check_choice, check_count, check_positive
from lightning_dist.engine.data_parallel.ddp_options import Compression, GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.missing_gradients import some_names
from lightning_dist.engine.parallelize.separate_updates import check_separate_updates
from lightning_dist.engine.parallelize.shard_config import ShardConfig, Sharded
from lightning_dist.engine.sharding.fully_shard import is_indivisible
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.stashing.learning_rates import changes_of_groups
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.patch import gradient_hooks_of, has_gradient_hooks
from lightning_dist.strategies.base.model_checks import check_dense_gradients, check_optimizers
from lightning_dist.strategies.base.precision_plugin import half_precision_of


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


def check_hooks(module: pl.LightningModule) -> None:
    """Checks that no hook waits for the gradient of a parameter that FSDP2 replaces."""
    for name, parameter in module.named_parameters():
        before, behind = gradient_hooks_of(parameter)
        if before or (behind and not is_dtensor(parameter)):
            _refuse_hook(name, "which its shards or replicas would not call")


class HookCheck:
    """Refuses hooks that are added to sharded parameters, and would not run as on one device.

    Args:
        reduces_each: Whether each backward of an update reduces gradients.
    """

    def __init__(self, module: pl.LightningModule, *, reduces_each: bool) -> None:
        self._module = module
        self._reduces_each = reduces_each
        self._own = list(module.named_parameters())
        self._shards = [(name, p) for name, p in self._own if not is_indivisible(p)]
        self._left_whole = [(name, p) for name, p in self._own if is_indivisible(p)]
        self._gathered: list[tuple[str, nn.Parameter]] | None = None

    def check(self, *, accumulating: bool) -> None:
        """Checks the hooks between a step's forward and its backward."""
        if self._gathered is None:
            # The parameters that the root has gathered for a step; the same tensors in each step.
            own = {id(parameter) for _, parameter in self._own}
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
        f"The parameter {name!r} has a hook, {reason}. Change gradients in"
        " `on_before_optimizer_step` or `configure_gradient_clipping`, where `parameter.grad` is a"
        " DTensor; or use DDPStrategy."
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


def check_half_precision(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that shards can be gathered in half precision, as ``MixedPrecision`` asks."""
    if is_manual:
        raise ValueError(
            "With wrap='manual' `configure_model` decides what shards are gathered as. Give a"
            " `mp_policy` there in place of MixedPrecision, or use wrap='auto'."
        )
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"MixedPrecision would gather the parameters {own} of the LightningModule itself in"
            " half precision for its whole step. Put them into a module of their own."
        )


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
    if pipeline.is_traced:
        raise ValueError(
            f"layers={pipeline.layers!r} runs a module without calling its parts, where parameters"
            " are gathered. Use PipelineStrategy(layers='trace')."
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


# --- replicas -------------------------------------------------------------------------------------


def check_exchange(exchange: GradientExchange, local: LocalConfig) -> None:
    """Checks how gradients are averaged, if they are."""
    compression = exchange.compression
    check_choice("compression", compression, get_args(Compression))
    check_positive("topk_fraction", exchange.topk_fraction)
    if exchange.topk_fraction > 1:
        raise ValueError(
            f"topk_fraction={exchange.topk_fraction} is more than all elements of a gradient."
            " Pass a number above 0 and up to 1."
        )
    check_count("powersgd_rank", exchange.powersgd_rank)
    # PowerSGD needs two steps with whole gradients, in which the buckets are formed.
    check_count("powersgd_start_step", exchange.powersgd_start_step, at_least=2)
    check_positive("bucket_megabytes", exchange.bucket_megabytes)
    if compression != "none" and not local.averages_gradients:
        raise ValueError(
            f"compression={compression!r} has nothing to compress with"
            f" sync_every={local.sync_every}, outer={local.outer} and sync_warmup_steps=0: no"
            " gradients travel. Leave one of them out."
        )


def check_compressible(module: nn.Module, compression: str) -> None:
    """Checks that each gradient can be compressed."""
    if compression != "none":
        check_dense_gradients(module, "compressed messages")
    without = [n for n, p in module.named_parameters() if p.ndim == 0 or p.numel() == 0]
    if compression == "powersgd" and without:
        raise ValueError(
            f"compression='powersgd' cannot make matrices of {some_names(without)}, which have no"
            " dimension or no elements. Give them one: `torch.zeros(1)` in place of"
            " `torch.tensor(0.0)`; or use another compression."
        )


def check_uneven(exchange: GradientExchange, local: LocalConfig) -> None:
    """Checks that the arguments go with ranks that have different numbers of batches."""
    if local.averages_weights:
        raise ValueError(
            f"uneven_inputs=True does not go with sync_every={local.sync_every} and"
            f" outer={local.outer}: a replica without data would go on alone, driven by its"
            " momentum. Leave one of them out."
        )
    static_graph, finds_unused = exchange.static_graph, exchange.find_unused_parameters
    if static_graph or finds_unused:
        raise ValueError(
            f"uneven_inputs=True does not go with static_graph={static_graph} and"
            f" find_unused_parameters={finds_unused}: the empty step of a rank without data uses"
            " each parameter once. Leave them out."
        )


def check_uneven_module(module: pl.LightningModule, *, has_layer_sync: bool) -> None:
    """Checks that no step of a module needs a rank that has run out of data."""
    reasons = []
    if not module.automatic_optimization:
        reasons.append("automatic_optimization=False, whose optimizer steps are in the user's step")
    if has_layer_sync or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        reasons.append("synchronised BatchNorm, whose forward waits for all ranks")
    if "dataloader_iter" in signature(module.training_step).parameters:
        reasons.append("a training_step that takes dataloader_iter")
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            reasons.append(f"the metric {name!r} with dist_sync_on_step")
    if reasons:
        raise ValueError(
            f"uneven_inputs=True does not go with {'; '.join(reasons)}. A rank that has run out of"
            " data does not run the step."
        )


def check_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Checks that each rank has built the same model, and that no part of it is wrapped."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"{name!r} is wrapped in {type(part).__name__} already. Give the strategy the plain"
                " module; it wraps it itself."
            )
    own: dict[str, str] = {}  # in the order in which the ranks send them
    for name, p in module.named_parameters():
        own[f"parameter {name!r}"] = f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
    for name, b in module.named_buffers():
        own[f"buffer {name!r}"] = f"{tuple(b.shape)} {b.dtype}"
    # Else each rank would hold the names of all parameters once for each rank.
    digest = blake2b(repr(own).encode()).digest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, 1):
        difference = _difference(first, rank, other)
        if difference:
            raise ValueError(
                f"{difference} The ranks match what they send by its order and size. Build the"
                " same model on each rank, in the same order, with the same parameters frozen."
            )


def _difference(first: dict[str, str], rank: int, other: dict[str, str]) -> str:
    """Describes where a rank first differs from rank 0; empty if nowhere."""
    for name in {**first, **other}:
        there, here = first.get(name, "missing"), other.get(name, "missing")
        if there != here:
            return f"The {name} is {there} on rank 0 and {here} on rank {rank}."
    numbers = Counter[str]()  # of each kind so far
    for there, here in zip(first, other, strict=True):
        (kind, own), (_, others) = there.split(" ", 1), here.split(" ", 1)
        if there != here:
            return (
                f"The {kind} number {numbers[kind]} is {own} on rank 0 and {others} on rank {rank}."
            )
        numbers[kind] += 1
    return ""


def check_whole(module: nn.Module) -> None:
    """Checks that no earlier Trainer has left a module in shards."""
    if any(map(is_dtensor, module.parameters())):
        raise ValueError(
            "The module is sharded already, by an earlier Trainer's strategy, and this one computes"
            " with whole parameters. Give both the same, or load a checkpoint into a new module."
        )


def check_served_optimizers(optimizers: Sequence[Optimizer], num_servers: int) -> None:
    """Checks that the parameters of the optimizer can be shared out."""
    check_optimizers(optimizers)
    (optimizer,) = optimizers  # Lightning takes one in automatic optimization
    count = len({p for group in optimizer.param_groups for p in group["params"]})
    if count == 0:
        raise ValueError(
            "ParameterServerStrategy has nothing to serve: `configure_optimizers` returns no"
            " optimizer with parameters. Return one, or use DDPStrategy."
        )
    if num_servers > count:
        raise ValueError(
            f"num_servers={num_servers} are more than the optimizer's {count} parameters, and a"
            f" server has whole tensors. Pass num_servers={count} or fewer."
        )
    if num_servers > 1:
        check_separate_updates(optimizer, "server")


def check_no_loss_scale(plugin: Precision) -> None:
    """Checks that no step is left out, of which servers would not know."""
    half = half_precision_of(plugin)
    has_scale = half is not None and half.loss_scale is not None
    if has_scale or getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            "fp16 with a loss scale leaves out steps whose gradients overflow, of which servers do"
            " not know. Use bf16, or DDPStrategy."
        )


def check_servers_agree(optimizer: Optimizer, values: Sequence[list[dict[str, Any]]]) -> None:
    """Checks that values which an optimizer keeps in its groups are alike on all servers."""
    if any(any(changes_of_groups(values[0], other)) for other in values):
        raise ValueError(
            f"{type(optimizer).__name__} keeps one estimate for all parameters, and servers have"
            f" come to different ones: {list(values)}. Pass num_servers=1."
        )

"""Refuse modules and arguments that do not go with replicas, or with a parameter server's workers.

Each check raises ``ValueError`` with the reason, on all ranks alike, before any waits for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from inspect import Parameter, signature
from typing import Any, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import check_choice, check_count, check_positive
from lightning_dist.engine.data_parallel.ddp_options import Compression, GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.missing_gradients import some_names
from lightning_dist.engine.parallelize.separate_updates import check_separate_updates
from lightning_dist.engine.stashing.learning_rates import changes_of_groups
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.strategies.base.model_checks import check_dense_gradients, check_optimizers
from lightning_dist.strategies.base.precision_plugin import half_precision_of


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
    if compression == "powersgd" and exchange.find_unused_parameters:
        raise ValueError(
            "compression='powersgd' does not go with find_unused_parameters=True: it would add what"
            " earlier gradients have lost to parameters that a step leaves out. Use 'topk', 'int8'"
            " or another compression, or freeze what steps leave out."
        )
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
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    without = [n for n, p in trained if p.ndim == 0 or p.numel() == 0]
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


# --- parameter servers ----------------------------------------------------------------------------


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
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise ValueError(
            f"{type(optimizer).__name__} steps by another optimizer, {inner[0]!r}, which has this"
            " process's weights, and a server has others. Use that one alone, or DDPStrategy."
        )
    check_no_step_hooks(optimizer)
    needs_closure = signature(optimizer.step).parameters.get("closure")
    if needs_closure is not None and needs_closure.default is Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes gradients by a closure, and a server has no step"
            " to run. Use another optimizer, or DDPStrategy."
        )
    if num_servers > 1:
        check_separate_updates(optimizer, "server")


def check_no_step_hooks(optimizer: Optimizer) -> None:
    """Checks that no hook would run at a server, whose weights it does not know."""
    # Torch has no public list of them.
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    hooks += optimizer._optimizer_step_post_hooks.values()
    if hooks:
        names = [getattr(hook, "__name__", type(hook).__name__) for hook in hooks]
        raise ValueError(
            f"{type(optimizer).__name__} has step hooks, {some_names(names)}, and steps at a"
            " server. There they would not see this process's weights. Use"
            " `on_before_optimizer_step` and `on_train_batch_end` of the module, or DDPStrategy."
        )


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

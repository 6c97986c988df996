"""Describe in one line at the start of training how a model is sharded or replicated.

``strategy.describe()`` has the details; this is the line to look for in a log. The stages of a
pipeline are described with the first batch: see :mod:`.pipelining.start_line`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.common.table import format_count
from lightning_dist.engine.data_parallel.ddp_options import GradientExchange
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.sharding.wrap_summary import WrapSummary

_ALONE = "One rank holds the whole model."
_MOST_NAMES = 3


def describe_layout(mesh: MeshShape, parts: Sequence[str]) -> str:
    """Describes in one line how a model is sharded."""
    if mesh.world_size == 1:
        return _ALONE
    said = "; ".join(parts) or "the whole model on each rank"
    return f"{_axes(mesh)}: {said}; {_batches(mesh.data_size)}."


def describe_tensor(num_layers: int, num_cut: int, num_parameters: int) -> str:
    """Describes how many layers a tensor-parallel plan names, and how many parameters are cut."""
    share = num_cut / max(num_parameters, 1)
    return f"{num_layers} layers with {share:.0%} of the parameters cut"


def describe_shards(summary: WrapSummary, options: ShardingOptions, *, is_manual: bool) -> str:
    """Describes the units of a rank."""
    units = summary.rows[1:]
    classes = Counter(row.class_name for row in units)
    shown = shorten([f"{name} x{count}" for name, count in classes.items()], _MOST_NAMES)
    said = [f"units {shown} and the root" if units else "the root is the only unit"]
    if is_manual:
        return f"{said[0]}, as configure_model has sharded them"
    said += _describe_resharding(summary, options.reshard_after_forward)
    if options.param_dtype is not None:
        gradients = options.reduce_dtype or options.param_dtype
        said.append(f"{_name(options.param_dtype)} with {_name(gradients)} gradients")
    if options.offload:
        said.append("shards in host memory")
    return ", ".join(said)


def _describe_resharding(summary: WrapSummary, default: bool | int | None) -> list[str]:
    """Describes the resharding of units after the forward; empty for torch's default."""
    own = [row.unit.reshard_after_forward for row in summary.rows[1:]]
    usual = True if default is None else default
    kinds = Counter(_kept(usual if chosen is None else chosen) for chosen in own)
    if not kinds or ({*kinds} == {_kept(True)} and default is None):
        return []
    kinds += Counter([_kept(default or False)])  # of the root
    return [*kinds] if len(kinds) == 1 else [f"{kind} x{n}" for kind, n in kinds.items()]


def describe_replicas(
    mesh: MeshShape, num_parameters: int, exchange: GradientExchange, local: LocalConfig
) -> str:
    """Describes in one line how replicas train together."""
    if mesh.world_size == 1:
        return _ALONE
    when = "behind the backward"
    if exchange.overlap:
        when = f"in buckets of {exchange.bucket_megabytes:g} MB during the backward"
    form = "" if exchange.compression == "none" else f" as {exchange.compression}"
    said = f"gradients averaged{form} {when}"
    if local.averages_weights:
        said = describe_rounds(local, said)
    return (
        f"DDP: {mesh.world_size} replicas of {format_count(num_parameters)} parameters; {said};"
        f" {_batches(mesh.data_size)}."
    )


def describe_rounds(local: LocalConfig, before: str) -> str:
    """Describes how replicas average their weights."""
    steps, outer = local.sync_warmup_steps, local.outer
    warmup = f" behind {steps} updates with {before}" if steps else ""
    each = "update" if local.sync_every == 1 else f"{local.sync_every} updates"
    said = f"weights averaged every {each}{warmup}"
    if outer is not None:
        said += f", with outer steps of rate {outer.lr:g} and momentum {outer.momentum:g}"
    if local.fragments > 1:
        said += f", in {local.fragments} fragments"
    return said


def _axes(mesh: MeshShape) -> str:
    split = [name for name in ("pp", "dp_shard", "tp") if mesh.sizes[name] > 1]
    replicas = f", {mesh.dp_replicate} replicas" if mesh.dp_replicate > 1 else ""
    if split == ["dp_shard"]:
        return f"FSDP: shards on {mesh.dp_shard} ranks{replicas}"
    if split == ["tp"]:
        return f"Tensor parallelism on {mesh.tp} ranks{replicas}"
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.sizes.items() if size > 1)
    name = f"Mesh of {mesh.world_size} ranks, {sizes}"
    return name if mesh.pp == 1 else f"{name}, rank 0"


def _batches(count: int) -> str:
    return "1 batch a step" if count == 1 else f"{count} batches a step"


def _kept(reshard: bool | int) -> str:
    if reshard is True:
        return "resharded after forward"
    return f"resharded to {reshard} ranks after forward" if reshard else "gathered until backward"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

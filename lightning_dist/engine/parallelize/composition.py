"""Compose the parallelisms on a user's module.

The order is the specification: pipeline stages, tensor parallelism, compilation, activation
checkpointing, shards or replicas. Layers, plan and units are chosen on the whole model, before the
first cut. So all ranks choose the same, or raise the same error.

FSDP2 hooks into a forward, and a Lightning step is none. Without a pipeline the root of the shards
is a :class:`StepModule` around the module. In a pipeline each stage of a rank has a root: the
module that runs its layers. So the user's module keeps the user's class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.checkpoint.saved_names import take_whole_tensors
from lightning_dist.engine.common.device_mesh import axis
from lightning_dist.engine.data_parallel.ddp_options import StepModule
from lightning_dist.engine.data_parallel.wrapped_replica import WrappedReplica
from lightning_dist.engine.parallelize.find_stages import find_stages
from lightning_dist.engine.parallelize.parallelism import Parallelism
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.sharding.call_hooks import return_no_views
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.sharding.fully_shard import shard as fully_shard
from lightning_dist.engine.sharding.manual_steps import called_units, check_called
from lightning_dist.engine.sharding.recompute import checkpoint_activations, choose_recomputed
from lightning_dist.engine.sharding.wrap import ByClass, Unit
from lightning_dist.engine.sharding.wrap_summary import WrapSummary, describe
from lightning_dist.engine.splitting.cut import layers_of
from lightning_dist.engine.splitting.find_layers import refuse_ties
from lightning_dist.engine.splitting.find_loss_parameters import refuse_cuts
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.ties import cut_differently
from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule, check_not_sharded
from lightning_dist.engine.tensor_parallel.config import TensorConfig, resolve_plan
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensor_parallel.plan.first_calls import FirstCalls
from lightning_dist.engine.tensor_parallel.plan.verify import check_parts
from lightning_dist.engine.tensor_parallel.plan.vocabulary import check_head
from lightning_dist.engine.tensor_parallel.summary import PlanSummary, describe_plan
from lightning_dist.engine.tensors.module_tree import innermost, shardable_modules

_OTHER_PIECES = (
    "The tensor-parallel plan cuts one and leaves the other whole, or cuts them along different"
    " dimensions, so a rank of one stage has no part that a rank of the other has too, and their"
    " gradients cannot be summed. Give both a style that cuts rows, an embedding 'vocab' and a head"
    " 'colwise_gather', or leave both out of the plan."
)
_TWO_SHARDS = (
    "These stages are on one rank, and each of them is sharded by itself, so the parameter would"
    " become two. Use schedule='1f1b', whose ranks have one stage each."
)


@dataclass(frozen=True)
class ParallelModule:
    """A user's module, made parallel.

    Attributes:
        module: The user's module.
        roots: The modules to call: with the step, or with the input of each stage of this rank.
        split: The pipeline split; None without a pipeline.
        tensor_parallel: The tensor-parallel module; None without tensor parallelism.
        units: Names of the FSDP units on this rank.
        shards: The roots, if they are sharded; else empty.
        summary: Sizes of the units on this rank.
        sharding: FSDP options of the units that have none of their own.
        plan: The layers that ``plan='auto'`` shards, and why not the others; else None.
        is_manual: Whether a step calls backward and updates by itself.
        replica: Runs the steps of a replica and averages its gradients; None without replicas.
    """

    module: nn.Module
    roots: tuple[nn.Module, ...]
    split: PipelineSplit | None
    tensor_parallel: TensorParallelModule | None
    units: list[str]
    shards: tuple[FSDPModule, ...]
    summary: WrapSummary
    sharding: ShardingOptions
    plan: PlanSummary | None = None
    is_manual: bool = False
    replica: WrappedReplica | None = None


def parallelize(module: nn.Module, mesh: DeviceMesh, asked: Parallelism) -> ParallelModule:
    """Makes a module parallel in place.

    Args:
        module: The user's whole module; parameters may be on the meta device.
        mesh: The mesh that :func:`.build_mesh` returned.
        asked: The parallelisms to apply.

    Raises:
        ValueError: A policy or plan matches no module, or a size is not divisible.
    """
    split = None if asked.pipeline is None else find_stages(module, mesh, asked.pipeline, asked)
    keeps = _keep_all if split is None else split.keeps
    units = _on_this_rank(module, _choose_units(module, asked, split), keeps)
    if asked.is_manual:
        check_called(module, [unit.name for unit in units])
    recomputed = _choose_recomputed(module, units, asked.shard)
    tensor_parallel, plan = _shard_layers(module, axis(mesh, "tp"), asked.tensor, split)
    data_mesh = None if asked.shard is None else axis(mesh, *asked.data_axes)
    if split is not None and tensor_parallel is not None:
        pieces = cut_differently(split.ties, split.path, tensor_parallel.cuts)
        refuse_ties(pieces, _OTHER_PIECES)
    if split is not None and data_mesh is not None:
        refuse_ties(split.ties_within_a_rank, _TWO_SHARDS)
        refuse_cuts(split.layers, split.path, tensor_parallel.cuts if tensor_parallel else ())

    if split is not None and asked.shard is not None:
        split.cut()
    roots: tuple[nn.Module, ...] = (StepModule(module),)
    if split is not None:
        per_stage = split.layers_per_stage
        roots = tuple(layers_of(split.layers, per_stage, own) for own in split.stages)
    own = [unit for unit in units if keeps(unit.name)]
    kept = _kept_in_compiled(module, own, asked)
    own = [replace(u, reshard_after_forward=False) if u.name in kept else u for u in own]
    sharding = asked.sharding if split is None else _kept_whole(asked.sharding)
    summary = _describe(module, own, sharding)

    own = [unit for unit in own if unit.name not in kept]
    if asked.shard is not None:
        _compile(module, roots if split is not None else (module,), own, asked.shard)
        again = choose_recomputed(module, [unit.name for unit in recomputed if keeps(unit.name)])
        is_selective = asked.shard.activation_checkpointing == "selective"
        checkpoint_activations(again, keep_products=is_selective)

    shards: tuple[FSDPModule, ...] = ()
    if asked.shard is not None and data_mesh is not None:
        new = [] if asked.shard.policy.is_manual else own
        inner = StepModule(nn.ModuleList(map(module.get_submodule, kept))) if kept else None
        if inner is not None:
            roots = (StepModule(module, inner),)
        whole = [] if split is None else split.layers.placed_here()
        for root in roots if split is not None else ():  # users' steps get what they return
            return_no_views(root)
        traced = None if split is None else split.layers.traced_module
        shards = fully_shard(roots, module, new, data_mesh, sharding, inner, whole, traced)
    take_whole_tensors(module)
    replica = None if asked.replicas is None else WrappedReplica(module, asked.replicas)
    return ParallelModule(
        module=module,
        roots=roots,
        split=split,
        tensor_parallel=tensor_parallel,
        units=[unit.name for unit in own],
        shards=shards,
        summary=summary,
        sharding=sharding,
        plan=plan,
        is_manual=asked.is_manual,
        replica=replica,
    )


def _compile(
    module: nn.Module, roots: tuple[nn.Module, ...], units: list[Unit], shard: ShardConfig
) -> None:
    """Compiles the units, before checkpointing, through which the compiler does not see.

    A gather inside of compiled code would divide it. So of nested units the innermost are compiled.
    """
    if shard.compile:
        names = innermost([unit.name for unit in units if not unit.keep_fp32])
        for part in [module.get_submodule(name) for name in names] or roots:
            part.forward = torch.compile(part.forward)


def _kept_in_compiled(module: nn.Module, units: list[Unit], asked: Parallelism) -> list[str]:
    """Lists the modules kept in fp32, such as norms, inside of compiled units.

    As units they would be gathered within compiled code.
    """
    shard = asked.shard
    if asked.half is None or shard is None or not shard.compile or shard.policy.is_manual:
        return []
    if asked.pipeline is not None or asked.is_manual:  # a step is no call of one root
        return []
    kept = asked.half.kept(module)
    others = [unit.name for unit in units if not unit.keep_fp32]
    found = [unit.name for unit in units if unit.keep_fp32 and unit.name in kept]
    return [name for name in found if any(name.startswith(f"{other}.") for other in others)]


def _keep_all(_: str) -> bool:
    return True


def _kept_whole(sharding: ShardingOptions) -> ShardingOptions:
    """Turns ``reshard_after_forward`` off, unless the user has set it."""
    # Else each micro-batch would gather the parameters twice (as torchtitan found, too).
    if sharding.reshard_after_forward is not None:
        return sharding
    return replace(sharding, reshard_after_forward=False)


def _choose_units(module: nn.Module, asked: Parallelism, split: PipelineSplit | None) -> list[Unit]:
    if asked.shard is None:
        return []
    policy = asked.shard.policy
    if policy.is_manual:
        parts = module.named_modules()
        return [Unit(name) for name, part in parts if name and isinstance(part, FSDPModule)]
    if split is not None and split.layers.traced_module is not None:
        return []  # of a traced stage no module is called
    is_possible = _keep_all if split is None else split.is_in_a_layer
    shardable = shardable_modules(module)
    kept = [] if asked.half is None else asked.half.kept(module)
    chosen = policy.choose(module)
    if asked.is_manual:
        chosen = [*chosen, *called_units(module, chosen)]
    apart = [Unit(n, keep_fp32=True) for n in kept if n in shardable and is_possible(n)]
    units = policy.arrange(module, [*apart, *chosen])
    if split is None:
        return units
    units = [unit for unit in units if not split.is_beside(unit.name)]  # others stay whole
    divided = [unit.name for unit in units if not split.is_in_a_layer(unit.name)]
    if divided:
        raise ValueError(
            f"wrap={policy} selects {divided}, which are no part of one layer of the pipelined"
            f" module {split.path!r} and would be on several stages. Choose modules inside of its"
            " layers, or the layers themselves."
        )
    return units


def _on_this_rank(module: nn.Module, units: list[Unit], keeps: Callable[[str], bool]) -> list[Unit]:
    """Names units by their first places on this rank: a layer may repeat on several stages."""
    places: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        places.setdefault(part, []).append(name)

    def here(name: str) -> str:
        return next(filter(keeps, places[module.get_submodule(name)]), name)

    return [replace(unit, name=here(unit.name)) for unit in units]


def _choose_recomputed(
    module: nn.Module, units: list[Unit], shard: ShardConfig | None
) -> list[Unit]:
    if shard is None:
        return []
    mode = shard.activation_checkpointing
    if not isinstance(mode, str):
        return ByClass(list(mode)).select(module)
    return [] if mode == "none" else units


def _shard_layers(
    module: nn.Module, mesh: DeviceMesh | None, config: TensorConfig, split: PipelineSplit | None
) -> tuple[TensorParallelModule | None, PlanSummary | None]:
    """Applies tensor parallelism, if the mesh has it; returns the summary of an automatic plan."""
    if mesh is not None:
        check_not_sharded(module)
    styles: Mapping[str, Style] = {}
    if config.plan != "auto":
        styles = resolve_plan(module, config.plan)
    if mesh is None:
        return None, None
    words: PlanSummary | None = None
    if config.plan == "auto":
        found = find_plan(module, mesh.size())
        styles, words = found.styles, describe_plan(module, found.styles, found.reasons)
    else:
        check_parts(module, styles, mesh.size())
    if config.loss_parallel:
        check_head(module, styles, mesh.size())
    is_kept = _keep_all if split is None else split.keeps
    parts = mesh.size() if config.sequence_parallel else 1
    first_calls = FirstCalls(module, styles, mesh.size(), parts=parts, is_kept=is_kept)
    tensor_parallel = TensorParallelModule(
        module,
        styles,
        mesh,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        is_kept=is_kept,
        stage_of=(lambda _: None) if split is None else split.stage_of,
    )
    first_calls.watch()
    return tensor_parallel, words


def _describe(module: nn.Module, units: list[Unit], sharding: ShardingOptions) -> WrapSummary:
    half, reshard_by_default = sharding.param_dtype, sharding.reshard_after_forward
    return describe(
        module,
        units,
        bytes_per_element=None if half is None else half.itemsize,
        reshard_after_forward=True if reshard_by_default is None else reshard_by_default,
    )

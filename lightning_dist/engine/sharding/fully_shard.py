"""Shards a module's parameters with FSDP2, unit by unit.

A *unit* is a module whose parameters are gathered in one collective before its forward, and freed
after it. A root, the module that is called, is always a unit: it takes the parameters that no unit
inside it has.

For some needs FSDP2 has no public function, and this module uses private names: to forget a step
that an exception has ended (before torch 2.13), to train a unit that was frozen when the root was
first called, and to use other parameters of a unit in each step of an update. Nor has torch a
public name for whether a tensor is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.sharding.call_hooks import keep_containers
from lightning_dist.engine.sharding.gathered import gather_for_calls, param_groups
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.tensors.dtensor import is_dtensor, shard_like, stacked_dim
from lightning_dist.engine.tensors.module_tree import set_attribute
from lightning_dist.engine.tensors.patch import replacement


def forget_step(root: nn.Module) -> None:
    """Resets all units: their parameters are sharded, and no gradients are pending."""
    assert isinstance(root, FSDPModule)
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            _forget(module._get_fsdp_state())
            module.reshard()


def wait_for_writes(root: FSDPModule) -> None:
    """Lets the next all-gathers wait for writes into shards, which the device may still do.

    FSDP2 reads shards on a stream of its own, and lets that wait only where a forward begins.
    """
    comms: Any = root._get_fsdp_state()._comm_ctx
    if hasattr(comms, "all_gather_copy_in_stream"):  # there was a forward
        comms.all_gather_copy_in_stream.wait_stream(comms.device_handle.current_stream())


def _forget(state: Any) -> None:
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    state._modules_to_run_forward.clear()
    state._training_state = TrainingState.IDLE
    group = state._fsdp_param_group
    if group is not None:
        group._training_state = TrainingState.IDLE
        group._all_gather_result = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()


def note_unfrozen(root: nn.Module) -> None:
    """Lets units be trained whose parameters were all frozen when the root was first called.

    Under mixed precision such a unit has no dtype for its gradients, and its first backward fails.
    """
    for group in param_groups([root]):
        if getattr(group, "_orig_dtype", "unknown") is None:  # the root has been called
            group._init_mp_dtypes()


@contextmanager
def skip_never_gathered(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Lets a backward leave out units that were never gathered, such as a teacher that only looks.

    Under mixed precision FSDP2 looks for the gradient of each parameter behind a backward after
    which it reduces nothing, and fails for want of a gathered copy.
    """
    parameters = [p for group in param_groups(roots) for p in group.fsdp_params]
    # They have a dtype from the root's first forward on.
    called = [p for p in parameters if hasattr(p, "reduce_dtype")]
    never = [parameter for parameter in called if not hasattr(parameter, "_unsharded_param")]
    dtypes = [parameter.reduce_dtype for parameter in never]
    for parameter in never:
        parameter.reduce_dtype = None
    try:
        yield
    finally:
        for parameter, dtype in zip(never, dtypes, strict=True):
            parameter.reduce_dtype = dtype


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Options of all units, unless a wrap policy has others for some.

    Attributes:
        reshard_after_forward: Free the parameters between forward and backward: yes, no, or shard
            them over so many ranks. None frees them for all units but the root.
        param_dtype: Dtype of gathered parameters and computation; None for the parameters' own.
        reduce_dtype: Dtype in which gradients are reduced; None for the gradients' own.
        offload: Keep shards, gradients and optimizer state in host memory.
    """

    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False


def shard(
    roots: Sequence[nn.Module],
    module: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    options: ShardingOptions,
    kept: nn.Module | None = None,
    whole: Iterable[nn.Parameter] = (),
    mirror: nn.Module | None = None,
) -> tuple[FSDPModule, ...]:
    """Shards a module in place.

    Args:
        roots: Modules that will be called; each gets the parameters that no unit inside it has.
        module: The module with the units. Parameters may be on the meta device; :func:`fill` gives
            them values later.
        units: Units in the module, inner ones before outer ones.
        mesh: One axis to shard over, or two: replicas, then shards (HSDP).
        options: Options of the units that have none of their own.
        kept: Holds modules inside of the units, whose parameters stay in fp32 and are gathered
            together for its own call; None for none.
        whole: Parameters that each rank keeps whole, besides those that cannot be divided.
        mirror: Has the roots' parameters, too, and has the gathered ones while the roots do; it is
            not called.

    Returns:
        The roots.

    Raises:
        ValueError: A unit's trainable parameters are of several dtypes, or a parameter's class is
            derived from ``nn.Parameter``.
    """
    _check_classes(module)
    _check_stacks(module, mesh)
    for parameter in module.parameters():  # FSDP2 takes no other order in memory
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    left_whole = {p for p in module.parameters() if is_indivisible(p)} | {*whole}
    apart = set() if kept is None else set(kept.parameters())
    are_complex = _check_dtypes(roots, module, units, apart | left_whole)
    attributes = {name: dict(vars(p)) for name, p in module.named_parameters()}
    precision = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    # FSDP2 leaves complex parameters in their dtype, but would reduce gradients in a real one.
    of_complex = replace(precision, reduce_dtype=None)
    in_fp32 = MixedPrecisionPolicy(
        param_dtype=None if options.param_dtype is None else torch.float32,
        output_dtype=options.param_dtype,
    )
    is_cuda = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=is_cuda) if options.offload else OffloadPolicy()
    shard_one = partial(
        fully_shard, mesh=mesh, offload_policy=offload, shard_placement_fn=_shard_dim
    )
    if kept is not None:
        in_kept = MixedPrecisionPolicy(in_fp32.param_dtype, cast_forward_inputs=False)
        shard_one(kept, reshard_after_forward=False, mp_policy=in_kept)
        apart = set(kept.parameters())  # which it has replaced
    for unit in units:
        own, part = unit.reshard_after_forward, module.get_submodule(unit.name)
        usual = of_complex if part in are_complex else precision
        shard_one(
            part,
            reshard_after_forward=options.reshard_after_forward if own is None else own,
            mp_policy=in_fp32 if unit.keep_fp32 else usual,
            ignored_params=apart | left_whole,
        )
        keep_containers(part)
        gather_for_calls(part)
    # A root's input is the user's batch, targets too: their dtype is not ours to change.
    for root in roots:
        usual = of_complex if root in are_complex else precision
        others = set() if mirror is None else {*mirror.parameters()} - {*root.parameters()}
        with _with_mirror(root, mirror):
            shard_one(
                root,
                reshard_after_forward=options.reshard_after_forward,
                mp_policy=replace(usual, cast_forward_inputs=False),
                ignored_params=apart | left_whole | others,
            )
        keep_containers(root)
        gather_for_calls(root)
    for name, parameter in module.named_parameters():  # FSDP2 has replaced them
        vars(parameter).update(attributes.get(name, {}))
    return tuple(root for root in roots if isinstance(root, FSDPModule))


@contextmanager
def _with_mirror(root: nn.Module, mirror: nn.Module | None) -> Iterator[None]:
    """Returns a context manager in which FSDP2 finds a root's parameters in one more module."""
    if mirror is not None:
        root.add_module("mirror", mirror)
    yield
    if mirror is not None:
        delattr(root, "mirror")


def is_indivisible(parameter: Tensor) -> bool:
    """Returns whether a parameter has no dimension or no elements."""
    return parameter.ndim == 0 or parameter.numel() == 0


def is_left_whole(parameter: Tensor) -> bool:
    """Returns whether each rank has a parameter of a sharded module whole."""
    return not is_dtensor(parameter)


def _check_dtypes(
    roots: Sequence[nn.Module],
    module: nn.Module,
    units: Sequence[Unit],
    apart: Collection[nn.Parameter],
) -> set[nn.Module]:
    """Checks that a unit's gradients have one dtype, for they are reduced in one buffer.

    Returns the units and roots whose gradients are complex, or will be if all is frozen now.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    taken = set(apart) | {
        parameter
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for parameter in cast(nn.Module, part).parameters()
    }
    parts = [(unit.name, module.get_submodule(unit.name)) for unit in units]
    are_complex = set()
    for unit_name, part in [*parts, *(("(root)", root) for root in roots)]:
        own = [parameter for parameter in part.parameters() if parameter not in taken]
        taken.update(own)
        by_dtype: dict[torch.dtype, list[str]] = {}
        for parameter in own:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(names[parameter])
        if all(dtype.is_complex for dtype in by_dtype or {p.dtype for p in own}):
            are_complex.add(part)
        if len(by_dtype) > 1:
            held = [f"{dtype} ({shorten(found)})" for dtype, found in by_dtype.items()]
            raise ValueError(
                f"The unit {unit_name} would have trainable parameters of several"
                f" dtypes: {', '.join(held)}. Give them one, or make the modules with another one"
                " units of their own: wrap=AnyOf(EachBlock(), ByName([...]))."
            )
    return are_complex


def _check_classes(module: nn.Module) -> None:
    """Checks that no parameter has a class whose attributes FSDP2 would lose."""
    # It replaces parameters. bitsandbytes' have scales as attributes: without a word of complaint
    # their gradients are wrong from the second step on.
    for name, parameter in module.named_parameters():
        found = type(parameter)
        if nn.Parameter in found.__mro__[1:]:
            raise ValueError(
                f"{name!r} is a {found.__name__}, which FSDP2 would replace by a plain parameter"
                " without the attributes of its class, such as the scales of integers. Use"
                " DDPStrategy or PipelineStrategy, which leave parameters as they are."
            )


def _check_stacks(module: nn.Module, mesh: DeviceMesh) -> None:
    # FSDP2 shards along a dim other than the first one only in equal parts.
    num_shards = mesh.shape[-1]
    for name, parameter in module.named_parameters():
        dim = _shard_dim(parameter)
        size = parameter.shape[dim.dim] if dim is not None else num_shards
        if size % num_shards:
            raise ValueError(
                f"{name!r} stacks several matrices, such as queries, keys and values, so its"
                f" {size} input features are sharded, and dp_shard={num_shards} does not divide"
                " them. Use another width or dp_shard, or a layer for each matrix."
            )


def _shard_dim(parameter: nn.Parameter) -> Shard | None:
    """Returns the other dim than that of stacked matrices; None for FSDP2's default."""
    dim = stacked_dim(parameter)
    return None if dim is None else Shard(1 - dim)


@torch.no_grad()
def fill(
    root: nn.Module,
    names: Iterable[str],
    value_of: Callable[[str], Tensor],
    device: torch.device,
    *,
    offloaded: bool = False,
) -> None:
    """Fills tensors on the meta device with values; each rank keeps its shards only.

    Args:
        root: The sharded module.
        names: Names of the parameters and buffers to fill.
        value_of: Returns a whole tensor by name, the same on all ranks, and only one at a time.
        device: Device of the buffers.
        offloaded: Whether shards are in host memory.
    """
    places: dict[Tensor, list[str]] = {}
    of_parameters = root.named_parameters(remove_duplicate=False)
    for name, tensor in (*of_parameters, *root.named_buffers(remove_duplicate=False)):
        places.setdefault(tensor, []).append(name)
    parameters = dict(root.named_parameters())
    for name in names:
        old = parameters.get(name)
        if old is None:
            buffer = root.get_buffer(name)
            filled = value_of(name).to(device, buffer.dtype)
            for place in places[buffer]:
                set_attribute(root, place, filled)
            continue
        values = shard_like(value_of(name).to(old.dtype).contiguous(), old)
        if offloaded and isinstance(values, DTensor):  # FSDP2 looks at the device of the DTensor
            values = values.cpu()
        made = replacement(old, values)
        for place in places[old]:  # a tied one stays one
            set_attribute(root, place, made)


def move_rest(module: nn.Module, roots: Iterable[FSDPModule], device: torch.device) -> None:
    """Moves all tensors of the user's module but the shards, which stay in host memory.

    FSDP2 moves a root's buffers to the device, but nothing outside of the roots, and no metric.
    """
    parameters = (p for root in roots for p in cast(nn.Module, root).parameters())
    sharded = {id(p) for p in parameters if not is_left_whole(p)}
    # `.to` calls `_apply`, which metrics and FSDP2's modules override.
    module._apply(lambda t: t if id(t) in sharded else t.to(device))


def reshard(root: nn.Module) -> None:
    """Frees the gathered parameters, so that modules have their sharded parameters again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unshard(root: nn.Module) -> None:
    """Gathers all sharded parameters of a root that has been called before."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()

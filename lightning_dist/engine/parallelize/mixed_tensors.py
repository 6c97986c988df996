"""DTensors beside plain tensors, which torch refuses to compute with together.

``foreach=True`` and ``fused=True`` update a whole parameter group in a few calls, and on a GPU
``foreach`` is the default. A tensor-parallel model's norms are plain and its projections DTensors,
and a group usually has both. So while a step computes, each mesh's parameters are a group of their
own: two calls in place of one, with the same numbers. Between steps the groups are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

_Group: TypeAlias = dict[str, Any]
_WAYS = ("foreach", "fused")
_ONE_BY_ONE = dict.fromkeys(_WAYS, False)


@contextmanager
def split_groups_by_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Splits parameter groups by mesh while the optimizer's step computes.

    The closure that ``step`` is given as ``closure=`` still finds the user's groups. Only torch's
    own optimizers are known to update each parameter by itself. Another one may estimate something
    from its whole group, so that group stays one, and is updated one parameter at a time.

    Args:
        optimizer: Any optimizer; its groups without ``foreach`` and ``fused`` stay as they are.
    """
    groups = optimizer.param_groups
    split_groups: list[tuple[_Group, list[_Group]]] = []

    def split() -> None:
        join()
        split_groups.extend((group, _parts(optimizer, group)) for group in groups)
        groups[:] = [part for _, parts in split_groups for part in parts]

    def join() -> None:
        if not split_groups:
            return
        groups[:] = [group for group, _ in split_groups]
        for group, parts in split_groups:  # what the step has written into its group is kept
            group |= parts[0] | {key: group[key] for key in ("params", *_WAYS) if key in group}
        split_groups.clear()

    def before(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure: Callable[[], Any] | None = kwargs.get("closure")
        if closure is None:
            split()
            return None

        def compute_gradients() -> Any:
            join()
            result = closure()
            split()
            return result

        return args, {**kwargs, "closure": compute_gradients}

    hooks = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: join()),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        join()  # the post hook has not run if the step has failed


def _parts(optimizer: Optimizer, group: _Group) -> list[_Group]:
    """Returns the groups that torch can update; the group itself if it is one."""
    if not any(group.get(way, False) is not False for way in _WAYS):  # None may become True
        return [group]
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    without_kernel = isinstance(optimizer, SGD) and group["fused"] and by_mesh.keys() - {None}
    if len(by_mesh) < 2 and not without_kernel:
        return [group]
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return [group | _ONE_BY_ONE]
    # torch has no fused SGD for DTensors.
    of_shards = {"foreach": True, "fused": False} if without_kernel else {}
    return [
        group | {"params": parameters} | ({} if mesh is None else of_shards)
        for mesh, parameters in by_mesh.items()
    ]


_ON_A_PART = ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered")
_NO_ROWS = ("numel() == 0", "on an empty tensor")
_UNUSED = "appears to not have been used in the graph"
_FREED = "out of bounds for storage of size 0"


@contextmanager
def explain_shard_errors(*, has_units: bool) -> Iterator[None]:
    """Raises torch's errors about parts of parameters, or gathered ones, again, with advice.

    Args:
        has_units: Whether units of FSDP2 gather parameters; others are tensor-parallel.
    """
    try:
        yield
    except RuntimeError as error:
        if _FREED in str(error):
            raise ValueError(
                "A backward needed a parameter that FSDP2 had not gathered for it. Either an"
                " operation writes in place into the output of a unit (`nn.ReLU(inplace=True)`"
                " behind a linear layer that is a unit, say): leave `inplace=True` out, or let"
                " `wrap=` name the module around both. Or the forward takes gradients itself, as"
                " `torch.autograd.grad(..., create_graph=True)` does for forces, and shards are"
                " gathered for one backward only: use DDPStrategy. Or a unit leaves its result in a"
                " dict that it was given: let it return it. Or activation checkpointing runs a"
                " block again that appends to a list of the module's."
                f" ({str(error).splitlines()[0]})"
            ) from error
        if has_units and _UNUSED in str(error):
            error.add_note(
                "A unit's parameters are freed behind its forward, and the module shows its shards"
                " then. With reshard_after_forward=False, or shard='gradients', a step may take"
                " gradients by them."
            )
        if not _is_of_a_part(error):
            raise
        where = (
            " Parameters are whole while the module runs that is sharded as a unit. If the step"
            " calls layers inside of a unit, and not the unit, let `wrap=` name what it calls."
            if has_units
            else " The plan's layers compute with their own parts, in their forward. If the step"
            " needs the whole weight of one, leave that layer out of the plan."
        )
        raise ValueError(
            f"A step has computed with a parameter of which each rank has a part only.{where} If it"
            " adds a penalty on weights, use the optimizer's weight_decay. If it changes weights"
            " (a teacher's, say), use DDPStrategy."
            f" ({str(error).splitlines()[0]})"
        ) from error


def note_shard_errors(error: BaseException) -> None:
    """Adds advice to torch's error where a hook mixes parts of parameters with others, or copies.

    A copy is one of a unit, as an average of weights makes it.
    """
    if isinstance(error, AssertionError) and "FSDP does not support deepcopy" in str(error):
        error.add_note(
            "The module is sharded before `on_fit_start`, and units cannot be copied. For an"
            " average of weights use ShardedWeightAveraging, or DDPStrategy."
        )
    if isinstance(error, RuntimeError) and _is_of_a_part(error):
        error.add_note(
            "Each rank has a part of a parameter, and outside of steps it is not gathered. Take the"
            " whole one by `parameter.full_tensor()`, on all ranks. For averages of weights use"
            " ShardedWeightAveraging, or DDPStrategy."
        )
    if isinstance(error, RuntimeError | IndexError) and any(t in str(error) for t in _NO_ROWS):
        error.add_note(
            "If this tensor is of a parameter with fewer rows than ranks, this rank has no row of"
            " it. Take the whole one by `full_tensor()`, on all ranks."
        )


def _is_of_a_part(error: RuntimeError) -> bool:
    return any(text in str(error) for text in _ON_A_PART)

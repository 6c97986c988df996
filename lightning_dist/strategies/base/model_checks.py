"""Refuse modules, callbacks and optimizers that go wrong with parts or replicas of a model.

Each check raises ``ValueError``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Adagrad, Muon, Optimizer, Rprop

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.data_parallel.missing_gradients import some_names
from lightning_dist.engine.stashing.learning_rates import group_values
from lightning_dist.engine.tensors.dtensor import is_dtensor, is_overcut, local_part
from lightning_dist.engine.tensors.tree import tensors_in
from lightning_dist.strategies.base.lightning_internals import callbacks_of

_LOG_FOR_ALL = (
    "A scheduler that follows a metric, such as ReduceLROnPlateau, follows each rank's own: log"
    " that metric with `sync_dist=True`."
)


def check_callbacks(trainer: pl.Trainer) -> None:
    """Checks that no callback copies the model, or compares all of its parameters."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} compares all parameters of the model, of which each"
                " rank has a part only. Prune with DDPStrategy or on one device."
            )
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the whole model, of which each rank has a part"
                " only. Use `lightning_dist.callbacks.ShardedWeightAveraging`."
            )


def check_own_averages(trainer: pl.Trainer, kinds: tuple[type[pl.Callback], ...]) -> None:
    """Checks that no callback averages weights which differ between ranks."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, kinds):
            raise ValueError(
                f"{type(callback).__name__} averages the weights of each rank, and under this"
                " strategy ranks step apart, so that they would end with different averages. Let"
                " them step together (DDPStrategy(), or mode='sync' of a parameter server), or"
                " leave the callback out."
            )


def check_finetuning(trainer: pl.Trainer) -> None:
    """Checks that no callback adds parameter groups according to a rank's part of the model."""
    if any(isinstance(callback, BackboneFinetuning) for callback in callbacks_of(trainer)):
        raise ValueError(
            "BackboneFinetuning adds a parameter group where the backbone is and changes the rate"
            " of the last group, but on other ranks are other parts of the model. Give all"
            " parameters to the optimizer from the start, and freeze and unfreeze them in"
            " `on_train_epoch_start`."
        )


def check_dense_gradients(module: nn.Module, receiver: str) -> None:
    """Checks that no trainable embedding has sparse gradients, which receivers do not take."""
    sparse = [
        name
        for name, part in module.named_modules()
        if getattr(part, "sparse", False) is True
        and any(p.requires_grad for p in part.parameters(recurse=False))
    ]
    if sparse:
        raise ValueError(
            f"The gradients of {some_names(sparse)} are sparse, and {receiver} take dense ones."
            " Pass sparse=False (with AdamW in place of SparseAdam), or use DDPStrategy without"
            " compression."
        )


def check_initialised(module: nn.Module) -> None:
    """Checks that lazy modules have had their first call, in which they get their shapes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{some_names(lazy)} of lazy modules have no shape yet, and ranks cannot share them"
            " out. Call the model once in `setup`, in `with torch.no_grad()`, with tensors of the"
            " shapes of a batch; or in `configure_model`, where that builds it."
        )


def check_no_max_norm(module: nn.Module, reason: str, *, only_shared: bool = False) -> None:
    """Checks that no embedding shortens rows of its weight while it looks them up.

    Args:
        module: The user's module. Frozen embeddings count, too: they write as well.
        reason: What goes wrong, for the error.
        only_shared: Whether embeddings that share no weight with another module may do so.
    """
    holders = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
        if not only_shared or holders[id(part.weight)] > 1
    ]
    if found:
        raise ValueError(
            f"{some_names(found)} with max_norm shorten the rows that they look up, in the weight"
            f" itself: {reason}. Leave max_norm out, and shorten what was looked up in `forward`:"
            " `rows * (max_norm / rows.detach().norm(dim=-1, keepdim=True)).clamp(max=1)`."
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Checks that no optimizer treats all parameters as one vector."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS lays all parameters out as one vector, of which each rank has a part only, and"
            " evaluates a batch as often as it likes. Use an optimizer that takes one gradient per"
            " step, or DDPStrategy."
        )


def check_sharded_optimizers(optimizers: Sequence[Optimizer], group: dist.ProcessGroup) -> None:
    """Checks that torch can update shards with each optimizer."""
    for reason in filter(None, gather_objects(_find_unshardable(optimizers), group)):
        raise ValueError(
            f"{reason}. Ranks hold shards of parameters. Use AdamW or another optimizer that"
            " updates each element by itself, or DDPStrategy."
        )


def _find_unshardable(optimizers: Sequence[Optimizer]) -> str:
    for optimizer in optimizers:
        sharded = [g for g in optimizer.param_groups if any(map(is_dtensor, g["params"]))]
        reason = ""
        if isinstance(optimizer, Adafactor) and sharded:
            reason = "estimates by the rows and columns of whole matrices"
        elif isinstance(optimizer, Rprop) and sharded:
            reason = "writes where a mask says so, which torch cannot do in shards"
        elif isinstance(optimizer, Adagrad) and any(group["fused"] for group in sharded):
            reason = "has groups of shards with `fused=True`, for which torch has no kernel"
        elif isinstance(optimizer, Muon) and (small := _overcut(sharded)) is not None:
            shape = tuple(small.shape)
            reason = f"has a matrix of shape {shape} over more ranks than it has rows or columns"
        if reason:
            return f"{type(optimizer).__name__} {reason}"
    return ""


def _overcut(groups: list[dict[str, Any]]) -> Tensor | None:
    matrices = (p for group in groups for p in group["params"] if p.requires_grad)
    return next(filter(is_overcut, matrices), None)


def check_state_to_save(
    optimizers: Sequence[Optimizer], module: nn.Module, group: dist.ProcessGroup
) -> None:
    """Checks that a checkpoint can have what the optimizers of all ranks keep.

    Collective: every rank must call it. A plain tensor counts as the same on all ranks. If each has
    its own for its shard of a parameter, a checkpoint would have one rank's for all.

    Raises:
        ValueError: A number in a parameter group differs, or a plain tensor has a shard's shape.
    """
    check_group_values(optimizers, group)
    for found in filter(None, gather_objects(_find_plain_shard(optimizers, module), group)):
        kind, name, own, whole = found
        raise ValueError(
            f"{kind} keeps a plain tensor of shape {own} for {name!r}, which has shape {whole} and"
            " is sharded: each rank has its own, and a checkpoint would have one rank's for all."
            " Make the state by `torch.zeros_like(p)` of the parameter itself, not of"
            " `p.to_local()`, so that it is sharded like the parameter."
        )


def _find_plain_shard(
    optimizers: Sequence[Optimizer], module: nn.Module
) -> tuple[str, str, tuple[int, ...], tuple[int, ...]] | None:
    """Returns an optimizer's and a parameter's name, and the shapes of the shard and the whole."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            own = local_part(parameter).shape if is_dtensor(parameter) else None
            if own is None or own == parameter.shape:  # what is like both cannot be told
                continue
            # One element may be a number of its own, a count of steps say.
            kept = [v for v in tensors_in(entries) if v.numel() > 1 and not is_dtensor(v)]
            if any(value.shape == own for value in kept):
                name = names.get(id(parameter), "")
                return type(optimizer).__name__, name, tuple(own), tuple(parameter.shape)
    return None


def check_group_values(optimizers: Sequence[Optimizer], group: dist.ProcessGroup) -> None:
    """Checks that numbers in parameter groups are equal on all ranks with parameters of a group.

    Collective: every rank must call it. An optimizer with one estimate for all parameters computes
    a different estimate from each rank's part of the gradients.

    Raises:
        ValueError: A number differs.
    """
    kind, index, found = _first_difference(optimizers, group)
    if found:
        values = ", ".join(f"{key!r} ({_by_rank(ranks)})" for key, ranks in found.items())
        scheduled = f" {_LOG_FOR_ALL} Otherwise the optimizer has set it." if "lr" in found else ""
        raise ValueError(
            f"{kind} has other values in parameter group {index} on other ranks: {values}."
            f"{scheduled} An optimizer that makes one estimate for all parameters has a part of"
            " them on each rank. Use DDPStrategy, where all ranks have all gradients, or an"
            " optimizer without such an estimate, AdamW say."
        )


def check_learning_rates(optimizers: Sequence[Optimizer], group: dist.ProcessGroup) -> None:
    """Checks that replicas have equal learning rates, or their weights would drift apart.

    Collective: every rank must call it.

    Raises:
        ValueError: A learning rate differs.
    """
    kind, index, found = _first_difference(optimizers, group)
    if "lr" in found:
        raise ValueError(
            f"The learning rate of {kind}'s parameter group {index} differs between ranks:"
            f" {_by_rank(found['lr'])}. {_LOG_FOR_ALL}"
        )


def _by_rank(ranks: Mapping[float, int]) -> str:
    return ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())


def _first_difference(
    optimizers: Sequence[Optimizer], group: dist.ProcessGroup
) -> tuple[str, int, dict[str, dict[float, int]]]:
    """Returns an optimizer's name, the index of a parameter group, and what differs in it.

    Of each key it has the values, with a rank that has each.
    """
    found = gather_objects([(type(o).__name__, _numbers(o)) for o in optimizers], group)
    seen: dict[tuple[int, int], dict[str, dict[float, int]]] = {}
    for rank, of_rank in enumerate(found):
        for position, (_, groups) in enumerate(of_rank):
            for index, numbers in enumerate(groups):
                for key, value in numbers.items():
                    ranks = seen.setdefault((position, index), {}).setdefault(key, {})
                    if value == value:  # nan equals nothing
                        ranks.setdefault(value, rank)
    for (position, index), values in seen.items():
        differing = {key: ranks for key, ranks in values.items() if len(ranks) > 1}
        if differing:
            return found[0][position][0], index, differing
    return "", 0, {}


def _numbers(optimizer: Optimizer) -> list[dict[str, float]]:
    """Returns the numbers of each parameter group, none for a group without parameters here."""
    values = zip(optimizer.param_groups, group_values(optimizer), strict=True)
    return [
        {key: float(value) for key, value in found.items() if _is_number(value)}
        if group["params"]
        else {}
        for group, found in values
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)

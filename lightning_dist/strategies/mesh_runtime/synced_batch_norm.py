"""BatchNorm over the batches of all data replicas, on any device and backend.

torch's ``SyncBatchNorm`` refuses tensors of a CPU. This one is written in differentiable operations
around one collective, an all-reduce. A summand contributes to the losses of all ranks, so the sum's
gradient is the sum of the ranks' gradients, and the rest of the backward is autograd's.
Ranks may have different numbers of rows, or none. Only the ``forward`` of the layers is replaced.
On a GPU torch's own ``SyncBatchNorm`` is faster and is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_dist.engine.common.device_group import DeviceGroup


def synchronise(
    asked: LayerSync | None, module: nn.Module, replicas: DeviceGroup
) -> LayerSync | None:
    """Synchronises a module's BatchNorm over data replicas, if the Trainer asks for it.

    Args:
        asked: What the Trainer has given its strategy; None for ``sync_batchnorm=False``.
        module: The user's module, changed in place.
        replicas: The ranks that hold the same layers, and read other data.

    Returns:
        What has changed the module, and reverts the change.
    """
    # Anew for each run: the group of an earlier one may be gone.
    if isinstance(asked, TorchSyncBatchNorm | SyncedBatchNorm):
        kind = SyncedBatchNorm if replicas.device.type == "cpu" else ReplicaSyncBatchNorm
        asked = kind(replicas.group)
    if asked is not None:
        asked.apply(module)
    return asked


class _Replicas:
    """Holds a group, and stays the same in copies of layers, for their shapes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: object) -> _Replicas:
        return self


class SyncedBatchNorm(LayerSync):
    """Synchronises BatchNorm layers on a CPU, for the Trainer's ``sync_batchnorm=True``.

    Args:
        group: A group of the data replicas, which takes the layers' tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._replicas = _Replicas(group)

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for layer in _layers(model):
            synced = partial(_forward, layer, layer.forward, self._replicas)
            layer.forward = synced  # type: ignore[method-assign]
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for layer in _layers(model):
            vars(layer).pop("forward", None)
        return model


class ReplicaSyncBatchNorm(TorchSyncBatchNorm):
    """Synchronises BatchNorm layers on a GPU by torch's own layers, over the data replicas.

    Args:
        group: A group of the data replicas; torch would take all ranks, those of other stages too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, self._group)
        return converted


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _forward(
    layer: _BatchNorm, forward: Callable[[Tensor], Tensor], replicas: _Replicas, x: Tensor
) -> Tensor:
    """Normalizes over all ranks' rows in training; unchanged in evaluation."""
    if not layer.training:
        return forward(x)
    layer._check_input_dim(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shape = [1, -1, *[1] * (x.dim() - 2)]
    rows = [dim for dim in range(x.dim()) if dim != 1]

    group = replicas.group
    own_count = wide.new_full((1,), x.numel() // x.shape[1])
    totals = _sum(torch.cat([wide.sum(rows), own_count]), group)
    count = totals[-1].detach()
    if count <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel, not {int(count)}.")
    mean = totals[:-1] / count
    centred = wide - mean.view(shape)
    squares = _sum(centred.square().sum(rows), group)
    _update_running_statistics(layer, mean.detach(), squares.detach() / (count - 1))

    normalized = centred * (squares / count + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        normalized = normalized * layer.weight.view(shape)
    if layer.bias is not None:
        normalized = normalized + layer.bias.view(shape)
    return normalized.to(x.dtype)


@torch.no_grad()
def _update_running_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked += 1
    momentum = layer.momentum
    if momentum is None:  # the mean over all batches
        momentum = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), momentum)


def _sum(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks."""
    total: Tensor = _Sum.apply(summand, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, summand.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None

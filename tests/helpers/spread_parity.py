"""Compare a model that is sharded over ranks with a copy of it that is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.dtensor import whole


def largest_difference(
    model: nn.Module,
    styles: Mapping[str, Style],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    sequence_parallel: bool = False,
    steps: int = 3,
) -> float:
    """Trains both for some steps and compares losses and gradients; all ranks must call it."""
    alone = deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    sharded = TensorParallelModule(model, styles, mesh, sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, alone)]
    worst = 0.0
    for _ in range(steps):
        losses = [loss_of(net) for net in (model, alone)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        sharded.add_gradients()
        worst = max([worst, abs(losses[0].item() - losses[1].item()), *_gradients(model, alone)])
        for optimizer in optimizers:
            optimizer.step()
    return worst


def _gradients(model: nn.Module, alone: nn.Module) -> list[float]:
    ours, theirs = dict(model.named_parameters()), dict(alone.named_parameters())
    assert ours.keys() == theirs.keys()
    used = [name for name, parameter in theirs.items() if parameter.grad is not None]
    assert used == [name for name, parameter in ours.items() if parameter.grad is not None]
    return [float((whole(ours[n].grad) - theirs[n].grad).abs().max()) for n in used]

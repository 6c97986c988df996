"""Refuse hooks on gradients of sharded parameters, which would not run as on one device.

Each check raises ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.sharding.fully_shard import is_left_whole
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.patch import gradient_hooks_of, has_gradient_hooks


def check_same_hooks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Checks that all ranks have hooks on the same gradients. Collective.

    A hook that reads a sharded gradient waits for the other ranks.
    """
    own = [name for name, p in module.named_parameters() if has_gradient_hooks(p)]
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, 1):
        differing = sorted({*first} ^ {*other})
        if differing:
            here, there = (0, rank) if differing[0] in first else (rank, 0)
            raise ValueError(
                f"The parameter {differing[0]!r} has a hook on rank {here}, and none on rank"
                f" {there}, as `WandbLogger.watch(model)` puts them on rank 0 alone. A hook that"
                " reads a sharded gradient waits for all ranks. Log norms in"
                " `on_before_optimizer_step` instead, or put the hook on all ranks, or use"
                " DDPStrategy."
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
        gathered: Lists the copies that wait for a backward, with the names of the parameters.
        reduces_each: Whether each backward of an update reduces gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        gathered: Callable[[], list[tuple[str, nn.Parameter]]],
        *,
        reduces_each: bool,
    ) -> None:
        self._list_gathered = gathered
        self._reduces_each = reduces_each
        own = list(module.named_parameters())
        self._shards = [(name, p) for name, p in own if not is_left_whole(p)]
        self._left_whole = [(name, p) for name, p in own if is_left_whole(p)]
        self._gathered: list[tuple[str, nn.Parameter]] | None = None

    def check(self, *, accumulating: bool) -> None:
        """Checks the hooks between a step's forward and its backward."""
        if self._gathered is None:
            self._gathered = self._list_gathered()  # the same tensors in each step
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

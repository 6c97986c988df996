"""Refuse what sharding cannot do, on all ranks alike, before any waits for another."""

from __future__ import annotations

from typing import NoReturn

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.tensors.module_hooks import gradient_hooks_of, has_gradient_hooks
from lightning_dist.engine.tensors.shards import is_spread


def check_compression(compression: str) -> None:
    """Checks that gradients are to travel as they are.

    Args:
        compression: As given to the strategy.

    Raises:
        ValueError: They are not.
    """
    if compression != "none":
        raise ValueError(
            f"compression={compression!r} is DDPStrategy's: shards of gradients are sent as they"
            " are. To send less, train with precision='bf16-mixed' and reduce_dtype='bfloat16', or"
            " use DDPStrategy."
        )


def check_reshard(reshard_after_forward: bool | int | str, shard_size: int) -> None:
    """Checks that parameters can stay spread over so many ranks after the forward.

    Args:
        reshard_after_forward: As given to the strategy.
        shard_size: Ranks that share one replica.

    Raises:
        ValueError: It is no true divisor of the shard size.
    """
    if isinstance(reshard_after_forward, bool | str):
        return
    divisors = [size for size in range(2, shard_size) if shard_size % size == 0]
    if reshard_after_forward not in divisors:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the shard size of"
            f" {shard_size}, and be neither 1 nor all of it; use True, False"
            + (f" or one of {divisors}." if divisors else ".")
        )


def check_hooks(module: pl.LightningModule) -> None:
    """Checks that no hook waits for the gradient of a parameter that FSDP2 replaces.

    Args:
        module: The user's module.

    Raises:
        ValueError: One does, and would not be called, for shards are other parameters.
    """
    for name, parameter in module.named_parameters():
        before, behind = gradient_hooks_of(parameter)
        if before or (behind and not is_spread(parameter)):
            _refuse_hook(name, "which its shards or replicas would not call")


class HookCheck:
    """Refuses hooks that come when parameters are sharded, and would not run as on one device.

    Args:
        module: Sharded, and in no step.
        reduces_each: Whether each backward of an update reduces gradients.
    """

    def __init__(self, module: pl.LightningModule, *, reduces_each: bool) -> None:
        self._module = module
        self._reduces_each = reduces_each
        self._shards = list(module.named_parameters())
        self._gathered: list[tuple[str, nn.Parameter]] | None = None

    def check(self, *, accumulating: bool) -> None:
        """Looks at all parameters; to be called between a step's forward and its backward.

        Args:
            accumulating: Whether more gradients come before the update.

        Raises:
            ValueError: A hook would not be called, or not with what one device has.
        """
        if self._gathered is None:
            # What the root has gathered for a step; the same tensors in each step.
            own = {id(parameter) for _, parameter in self._shards}
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
        for name, parameter in self._gathered:
            if gradient_hooks_of(parameter)[0]:
                _refuse_hook(name, "which sees this rank's gradient, before ranks combine theirs")


def _refuse_hook(name: str, reason: str) -> NoReturn:
    raise ValueError(
        f"The parameter {name!r} has a hook (`register_hook` or"
        f" `register_post_accumulate_grad_hook`), {reason}. Change"
        " gradients in `on_before_optimizer_step` or `configure_gradient_clipping`, where"
        " `parameter.grad` is a DTensor; or use DDPStrategy."
    )


def check_shardable(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that a module can be sharded.

    Args:
        module: The user's module.
        is_manual: Whether it should have sharded itself.

    Raises:
        ValueError: It has a parameter without a dimension or without elements, has
            not sharded itself though it should, or the other way round.
    """
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    # Where one unit is all of it, an earlier run's unit is around the module, not in it.
    if not is_manual and (is_sharded or any(is_spread(p) for p in module.parameters())):
        raise ValueError(
            "The module is sharded already, as part of another LightningModule that was trained, or"
            " by its own `configure_model`. Go on with that LightningModule, load its checkpoint"
            " into a new one, or pass wrap='manual'."
        )
    if is_manual and not is_sharded:
        raise ValueError(
            "wrap='manual' expects that `configure_model` has called `fully_shard`, and no module"
            " is sharded. Call it there with `mesh=self.trainer.strategy.device_mesh`, or use"
            " wrap='auto'."
        )
    scalars = [name for name, p in module.named_parameters() if p.ndim == 0]
    if scalars:
        raise ValueError(
            f"The parameters {scalars} have no dimension to shard. Give them one:"
            " `torch.zeros(1)` in place of `torch.tensor(0.0)`."
        )
    empty = [n for n, p in module.named_parameters() if p.requires_grad and p.numel() == 0]
    if empty:
        raise ValueError(
            f"The parameters {empty} have no elements, and FSDP cannot reduce their gradients."
            " Leave them out, or freeze them with `requires_grad_(False)`."
        )


def check_automatic(module: pl.LightningModule) -> None:
    """Checks that no step of a module calls backward by itself.

    Args:
        module: The user's module.

    Raises:
        ValueError: One does.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "Manual optimization calls backward inside of the step, where ranks that share layers,"
            " or have other ones, cannot complete the gradients. Use automatic optimization,"
            " FSDPStrategy or DDPStrategy."
        )


def check_optimization(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that a module optimizes as it did when it was sharded.

    Args:
        module: The user's module.
        is_manual: Whether it was sharded for steps that call backward.

    Raises:
        ValueError: It does so by itself now, and did not.
    """
    if not is_manual and not module.automatic_optimization:
        raise ValueError(
            "The module was sharded for automatic optimization, and `automatic_optimization` is"
            " False now. Set it in `__init__`, or load a checkpoint into a new module."
        )


def check_half_precision(module: pl.LightningModule, is_manual: bool) -> None:
    """Checks that shards can be gathered in half precision where others compute so.

    Args:
        module: The user's module.
        is_manual: Whether it has sharded itself.

    Raises:
        ValueError: It has, or a parameter belongs to no module that is called.
    """
    if is_manual:
        raise ValueError(
            "MixedPrecision says what shards are gathered as, and wrap='manual' leaves that to"
            " `configure_model`. Use wrap='auto', or a `mp_policy` there and no callback."
        )
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"The parameters {own} of the LightningModule itself would be gathered in half"
            " precision, and its steps use them beside a loss in fp32. Put them into a module"
            " of their own."
        )

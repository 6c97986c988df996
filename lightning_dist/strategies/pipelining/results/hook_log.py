"""Reduce the values that hooks log with ``sync_dist=True`` over the stages.

Each stage has a part of such a value: the norm of its gradients, a sum over its weights. Stages may
log under different names, so calls are kept until all stages exchange them at one place. A value of
several stages is reduced by the call's ``reduce_fx``; that of a single stage becomes known to all.

The stages exchange calls behind each batch only if a hook that may log there is overridden, and
never under an asynchronous schedule, for stages are at different batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.tensors.dtensor import whole
from lightning_dist.engine.tensors.patch import replace_method, surround_method
from lightning_dist.strategies.base.callback_order import add_first_callback, is_overridden_by_user
from lightning_dist.strategies.base.lightning_internals import as_of_hook, hook_of
from lightning_dist.strategies.pipelining.results.step_log import reduction_of

_IN_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_BEHIND_BATCH = ("on_train_batch_end",)
_BEHIND_EPOCH = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")


@dataclass(frozen=True, slots=True)
class HookCall:
    """One ``self.log`` call of a hook.

    Attributes:
        key: Name of the hook, name of the value, and number of earlier calls with these names.
    """

    key: tuple[str, str, int]
    value: float
    dtype: torch.dtype
    options: dict[str, Any]


def merge_calls(calls_of_stages: Sequence[Sequence[HookCall]]) -> list[HookCall]:
    """Reduces the calls of all stages.

    Returns:
        One call for each key; the calls of one hook follow each other.
    """
    by_key: dict[tuple[str, str, int], list[HookCall]] = {}
    for call in chain(*calls_of_stages):
        by_key.setdefault(call.key, []).append(call)
    hooks = [*dict.fromkeys(hook for hook, *_ in by_key)]
    merged = []
    for first, *others in sorted(by_key.values(), key=lambda calls: hooks.index(calls[0].key[0])):
        values = torch.tensor([call.value for call in (first, *others)], dtype=torch.float64)
        reduce = getattr(torch, first.options["reduce_fx"])
        merged.append(replace(first, value=float(reduce(values))))
    return merged


class HookLog:
    """Keeps the ``self.log`` calls of one stage's hooks, and replays those of all stages.

    Args:
        module: The user's module; its ``log`` is replaced until :meth:`close`.
        asynchronous: Whether stages are at different batches.
    """

    def __init__(
        self, module: pl.LightningModule, stages: dist.ProcessGroup, *, asynchronous: bool
    ) -> None:
        self._module = module
        self._stages = stages
        self._kept: list[HookCall] = []
        self._count: Counter[tuple[str, str]] = Counter()
        kinds = (_IN_BATCH, _BEHIND_BATCH)
        own = [not asynchronous and is_overridden_by_user(names, module) for names in kinds]
        in_batch, behind_batch = map(any, zip(*gather_objects(own, stages), strict=True))
        self._hooks = (*_IN_BATCH * in_batch, *_BEHIND_BATCH * behind_batch, *_BEHIND_EPOCH)
        self._log = module.log

        @wraps(module.log)  # a function, which copies of the module may share
        def log(*args: Any, **options: Any) -> None:
            self._keep(*args, **options)

        self._undo = [replace_method(module, "log", log)]
        if in_batch:
            # Before other callbacks read the logged values.
            exchange = LambdaCallback(on_train_batch_end=lambda *_: self.exchange())
            self._undo.append(add_first_callback(module.trainer, exchange))
        names = (*_BEHIND_BATCH * behind_batch, *_BEHIND_EPOCH)
        self._undo += [surround_method(module, name, after=self.exchange) for name in names]

    def close(self) -> None:
        """Restores the module's methods."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def exchange(self) -> None:
        """Replays the kept calls of all stages. Collective: every stage must call it."""
        if not self._any_kept():
            return
        calls_of_stages = gather_objects(self._kept, self._stages)
        self._kept = []
        self._count.clear()
        for call in merge_calls(calls_of_stages):
            hook, name, _ = call.key
            value = torch.tensor(call.value, dtype=call.dtype, device=self._module.device)
            with as_of_hook(self._module, hook):
                self._log(name, value, **call.options)

    def _any_kept(self) -> bool:
        """Returns whether any stage has calls, in a third of the time of an empty gather."""
        count = torch.tensor([len(self._kept)], dtype=torch.int32)
        dist.all_reduce(count, group=self._stages)
        return bool(count.item())

    def _keep(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        hook = hook_of(self._module)
        is_shared = options.get("sync_dist") and not options.get("rank_zero_only")
        is_number = isinstance(value, float | int | Tensor)
        if args or hook not in self._hooks or not is_shared or not is_number:
            self._log(name, value, *args, **options)
            return
        options["reduce_fx"] = reduction_of(name, options.get("reduce_fx", "mean"))
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        dtype = value.dtype if is_floating else torch.get_default_dtype()
        number = float(whole(value.detach()) if isinstance(value, Tensor) else value)
        key = (hook, name)
        self._kept.append(HookCall((*key, self._count[key]), number, dtype, options))
        self._count[key] += 1

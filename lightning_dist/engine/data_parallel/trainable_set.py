"""Detects parameters that were frozen or unfrozen since the replicas were wrapped.

torch's DistributedDataParallel averages the gradients of the parameters that were trainable when it
was built, and of no others. Fine-tuning unfreezes layers as it goes, which needs a new wrapper.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.data_parallel.replicas import average_used


class TrainableSet:
    """The trainable parameters, which must be the same on each rank.

    A rank that sees a change must know whether the other ranks see it too. But it must not wait for
    a rank that sees none and goes on. So each rank posts a fingerprint of its set before each
    batch. Only a rank with a change waits for the fingerprints, which every rank has posted.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        self._names: tuple[str, ...] = names
        self._parameters: tuple[nn.Parameter, ...] = parameters
        self._group = group
        self._flags = self._read()
        self._fingerprint = _fingerprint_of(self._flags)
        self._pending: tuple[dist.Work, Tensor] | None = None

    def begin_batch(self) -> list[nn.Parameter] | None:
        """Returns the newly frozen parameters, before a batch. Collective: every rank must call it.

        Raises:
            ValueError: The ranks' sets differ, or nothing is left to train.
        """
        flags = self._read()
        changed = self._changed(flags)
        self._compare(changed)
        if changed:
            self._fingerprint = _fingerprint_of(flags)
        extremes = torch.tensor([self._fingerprint, -self._fingerprint])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        self._pending = work, extremes
        if not changed:
            return None
        self._compare(changed)
        if not any(flags):
            raise ValueError(
                f"All parameters are frozen, the last of them {changed[:8]}. Leave at least one"
                " with `requires_grad_(True)`."
            )
        before, self._flags = self._flags, flags
        frozen = zip(before, flags, self._parameters, strict=True)
        return [p for was, now, p in frozen if was and not now]

    def check_step(self, *, exactly: bool) -> None:
        """Checks that the step did not change the set of trainable parameters.

        A frozen one is an error only if ``exactly``: steps that call backward themselves freeze one
        optimizer's parameters while another's are trained.
        """
        flags = self._read()
        changed = self._changed(flags)
        if not exactly:
            trained = {name for name, flag in zip(self._names, flags, strict=True) if flag}
            changed = [name for name in changed if name in trained]
        if changed:
            raise ValueError(
                f"The training step has frozen or unfrozen {changed[:8]} while it ran, when the"
                " exchange of gradients was prepared for others. Do it in a hook before the step,"
                " such as on_train_epoch_start or on_train_batch_start."
            )

    def left_out(self) -> list[str]:
        """Names the parameters that were frozen since the batch began and have no gradient."""
        rows = zip(self._names, self._parameters, self._flags, strict=True)
        return [n for n, p, was in rows if was and not p.requires_grad and p.grad is None]

    def close(self, *, failed: bool) -> None:
        """Waits for the pending all-reduce."""
        if self._pending is not None and not failed:
            self._pending[0].wait()
        self._pending = None

    def _read(self) -> bytes:
        return bytes([p.requires_grad for p in self._parameters])

    def _changed(self, flags: bytes) -> list[str]:
        if flags == self._flags:
            return []
        rows = zip(self._names, self._flags, flags, strict=True)
        return [name for name, was, now in rows if was != now]

    def _compare(self, changed: list[str]) -> None:
        if self._pending is None:
            return
        work, extremes = self._pending
        self._pending = None
        work.wait()
        if int(extremes[0]) != -int(extremes[1]):
            raise ValueError(
                "The ranks train different parameters: this one (rank"
                f" {dist.get_rank()}) has frozen or unfrozen {changed[:8] or 'none'} since the"
                " last batch, and another one has not done the same. Freeze and unfreeze the same"
                " parameters on each rank, in the same hook."
            )


def average_left_gradients(
    parameters: list[nn.Parameter], group: DeviceGroup, control_group: dist.ProcessGroup
) -> None:
    """Averages the gradients accumulated before their parameters were frozen.

    The step that ends the accumulation averages the gradients of trainable parameters only, but
    optimizers apply every gradient. Collective: every rank must call it.
    """
    if not parameters:
        return
    present = torch.tensor([int(p.grad is not None) for p in parameters])
    dist.all_reduce(present, dist.ReduceOp.MAX, control_group)
    own = [p for p, there in zip(parameters, present, strict=True) if there]
    for parameter, mean in zip(own, average_used([p.grad for p in own], own, group), strict=True):
        parameter.grad = mean


def _fingerprint_of(flags: bytes) -> int:
    return int.from_bytes(blake2b(flags, digest_size=7).digest(), "little")

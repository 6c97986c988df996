"""Completes an all-reduce of gradients that waits for gradients which this rank does not have.

torch's DistributedDataParallel sends a bucket when each parameter in it has its gradient. When a
step leaves a parameter out on one rank, the others wait for ever. Here a missing gradient counts as
zero. A parameter that no rank has used is a mistake, which all ranks must report in the same step,
without a message in each step. So a rank leaves a note of its missing gradients before it sends the
zeros. A rank that has all averages has received them from all ranks, so it finds all notes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import finish
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.data_parallel.used_parameters import UsedParameters


class MissingGradients:
    """Sends zeros for the gradients that are missing after a backward."""

    def __init__(self, module: nn.Module, notes: RankNotes) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        self._names: tuple[str, ...] = names
        self._parameters: tuple[nn.Parameter, ...] = parameters
        self._notes = notes
        self._num_rounds = 0
        self._had_gradient: list[bool] = []
        self._used = UsedParameters(module)

    def begin_backward(self) -> None:
        """Records the gradients of earlier backwards, and hooks into each trainable parameter."""
        self._had_gradient = [parameter.grad is not None for parameter in self._parameters]
        self._used.take(self._parameters)
        self._used.watch()

    def end_backward(self) -> list[str]:
        """Sends the missing zeros; names the parameters without a gradient on any rank."""
        self._num_rounds += 1
        were_used = self._used.take(self._parameters)
        missing = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad and not were_used[index]
        ]
        if not missing:
            return []
        without = [index for index in missing if not self._had_gradient[index]]
        self._notes.leave(self._num_rounds, without)
        zero_loss([self._parameters[index] for index in missing]).backward()
        finish(self._parameters[0].device)
        return [self._names[index] for index in self._notes.common(self._num_rounds, without)]

    def close(self) -> None:
        """Removes the hooks."""
        self._used.close()


def zero_loss(parameters: Sequence[Tensor]) -> Tensor:
    """Returns a loss of zero whose gradients are zeros."""
    # Sums of no elements: zero even if a weight is not finite.
    return torch.stack([p.reshape(-1)[:0].sum().float() for p in parameters]).sum()


def check_gradients(without: Sequence[str]) -> None:
    """Checks that the backward has reached each trainable parameter."""
    if without:
        raise ValueError(
            f"The loss does not depend on {some_names(without)}. Freeze what is not trained with"
            " `requires_grad_(False)` ahead of the step, or, if other steps use it, pass"
            " find_unused_parameters=True (to a MeshStrategy in shard=ShardConfig(...), which with"
            " tp=... is what TensorParallelStrategy is)."
        )


def parameters_without_gradient(module: nn.Module) -> list[str]:
    """Names the trainable parameters that this rank's backward has not reached."""
    return [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]


def check_toggled(toggled: Sequence[str]) -> None:
    """Checks that a step has frozen no parameter whose gradient the replicas wait for."""
    if toggled:
        raise ValueError(
            f"The step has frozen {some_names(toggled)}, as `toggle_optimizer` does, and called"
            " backward: the gradients of the others would wait for theirs. Pass"
            " find_unused_parameters=True."
        )


def some_names(names: Sequence[str]) -> str:
    """Lists the first eight names, for an error."""
    return f"{list(names[:8])}{' and more' if len(names) > 8 else ''}"

"""Completes an all-reduce of gradients that waits for gradients which this rank does not have.

torch's DistributedDataParallel sends a bucket when each parameter in it has got its gradient. When
a step leaves a parameter out on one rank, the other ranks wait for ever. Here a missing gradient
counts as zero. A parameter that no rank has used is a mistake, which all ranks must report in the
same step. But a rank that lacks nothing cannot know of it, and a message in each step costs time.
So a rank leaves a note of its missing gradients before it sends the zeros. A rank that has all
averages has received them from all ranks, so it finds all notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.comms.store_notes import RankNotes, finish


class MissingGradients:
    """Sends zeros for the gradients that are missing after a backward.

    Args:
        module: This rank's replica.
        notes: Store for the notes of the replicas.
    """

    def __init__(self, module: nn.Module, notes: RankNotes) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        self._names: tuple[str, ...] = names
        self._parameters: tuple[nn.Parameter, ...] = parameters
        self._notes = notes
        self._num_rounds = 0
        self._had_gradient: list[bool] = []
        self._arrived: set[int] = set()
        self._hooks: dict[int, RemovableHandle] = {}

    def begin_backward(self) -> None:
        """Records the gradients of earlier backwards, and hooks into each trainable parameter."""
        self._arrived.clear()
        self._had_gradient = [parameter.grad is not None for parameter in self._parameters]
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._hooks:
                note = partial(self._note, index)
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(note)

    def end_backward(self) -> list[str]:
        """Sends zeros for the gradients that are missing, and waits for the averages.

        Returns:
            Names of the parameters that have no gradient on any rank; the same on all ranks.
        """
        self._num_rounds += 1
        missing = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad and index not in self._arrived
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
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _note(self, index: int, _: Tensor) -> None:
        self._arrived.add(index)


def zero_loss(parameters: Sequence[Tensor]) -> Tensor:
    """Returns a loss of zero whose gradients are zeros."""
    # Sums of no elements: zero even if a weight is not finite.
    return torch.stack([p.reshape(-1)[:0].sum().float() for p in parameters]).sum()

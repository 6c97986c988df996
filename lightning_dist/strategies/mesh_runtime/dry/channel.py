"""Channels to stages that do not exist: sent tensors are counted, received ones have no values.

Ranks are tried one after the other. The tensors that a stage would send to the next are kept as
shapes. From the shapes the next stage's activations are made, and the gradients that the next stage
would send back: one for each tensor that requires grad, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.connect import wire
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.runtime import WeighedGradients
from lightning_dist.engine.tensors.tree import flatten, unflatten


@dataclass(frozen=True, slots=True)
class DryMessage:
    """Stands for a tree of tensors.

    Attributes:
        tensors: Shape, dtype and ``requires_grad`` of each tensor.
        skeleton: The tree without its tensors.
    """

    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    skeleton: Any

    @classmethod
    def of(cls, tree: Any) -> DryMessage:
        """Creates the message of a tree, without the tree's values."""
        tensors, skeleton = flatten(tree)
        return cls(tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), skeleton)

    def make(self) -> Any:
        """Creates a tree of these shapes."""
        made = [torch.empty(s, dtype=d).requires_grad_(grad) for s, d, grad in self.tensors]
        return unflatten(made, self.skeleton)

    def gradients(self) -> DryMessage:
        """Returns the message that would come back for this one."""
        wanted = [(s, d) for s, d, requires_grad in self.tensors if requires_grad]
        return DryMessage.of(WeighedGradients([torch.empty(s, dtype=d) for s, d in wanted]))


Sent = Mapping[int, DryMessage]
"""The messages that a stage has sent, by tag."""


class DrySender(Sender):
    """Records the messages that are sent, and notes the bytes of each."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self.sent: dict[int, DryMessage] = {}
        self._note = note

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        self._note(sum(t.nbytes for t in flatten(tree)[0]))
        self.sent[tag] = DryMessage.of(tree)

    @override
    def close(self, *, failed: bool = False) -> None:
        """Does nothing."""


class DryReceiver(Receiver):
    """Creates the tensors of a message, found by its tag, when it is received."""

    def __init__(self, find: Callable[[int], DryMessage]) -> None:
        self._find = find

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        return self._find(tag).make()

    @override
    def interrupt(self, error: BaseException) -> None:
        """Does nothing: no receive waits."""

    @override
    def close(self, *, failed: bool = False) -> None:
        """Does nothing."""


def dry_links(
    rank_of_stage: Sequence[int], rank: int, known: Mapping[int, Sent], note: Callable[[int], None]
) -> tuple[Links, Mapping[int, Sent]]:
    """Creates the channels of a rank that is alone.

    Returns:
        The links for the runtime, and the messages of this rank's stages to other ranks' stages.
    """
    sent: dict[int, Sent] = {}

    def sender(source: int, target: int) -> DrySender:
        end = DrySender(note)
        if source < target:
            sent[source] = end.sent
        return end

    def receiver(source: int, target: int) -> DryReceiver:
        if source < target:
            return DryReceiver(lambda tag: known[source][tag])
        return DryReceiver(lambda tag: sent[target][tag].gradients())

    return wire(rank_of_stage, rank, sender, receiver), sent

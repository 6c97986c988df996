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
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.connect import wire
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.runtime import WeightedGradients
from lightning_dist.engine.tensors.tree import flatten, tensors_in, unflatten


@dataclass(frozen=True, slots=True)
class DryMessage:
    """Stands for a tree of tensors.

    Attributes:
        tensors: Shape, dtype and ``requires_grad`` of each tensor; a tensor of integers, whose
            values may be sizes, as in a packed sequence, itself.
        skeleton: The tree without its tensors.
    """

    tensors: tuple[tuple[torch.Size, torch.dtype, bool] | Tensor, ...]
    skeleton: Any

    @classmethod
    def of(cls, tree: Any) -> DryMessage:
        """Creates the message of a tree, without the tree's floating-point values."""
        tensors, skeleton = flatten(tree)
        forms = ((t.shape, t.dtype, t.requires_grad) if _has_gradient(t) else t for t in tensors)
        return cls(tuple(forms), skeleton)

    def make(self) -> Any:
        """Creates a tree of these shapes."""
        return unflatten([_made(form) for form in self.tensors], self.skeleton)

    def gradients(self) -> DryMessage:
        """Returns the message that would come back for this one."""
        made = [_made(form) for form in self.tensors]
        wanted = [tensor.detach() for tensor in made if tensor.requires_grad]
        return DryMessage.of(WeightedGradients([*wanted]))


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _made(form: tuple[torch.Size, torch.dtype, bool] | Tensor) -> Tensor:
    if isinstance(form, Tensor):
        return form
    shape, dtype, requires_grad = form
    return torch.empty(shape, dtype=dtype).requires_grad_(requires_grad)


Sent = Mapping[int, DryMessage]
"""The messages that a stage has sent, by tag."""


class DrySender(Sender):
    """Records the messages that are sent, and notes the bytes of each."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self.sent: dict[int, DryMessage] = {}
        self._note = note

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        self._note(sum(t.nbytes for t in tensors_in(tree)))
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

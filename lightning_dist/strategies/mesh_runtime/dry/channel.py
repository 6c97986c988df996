"""Channels to stages that do not exist: sent tensors are counted, received ones have no values.

Ranks are tried one after the other. The tensors that a stage would send to the next are kept as
shapes. From the shapes the next stage's activations are made, and the gradients that the next stage
would send back: one for each tensor that requires grad, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist.engine.pipeline.connect import wire
from lightning_dist.engine.pipeline.loss import WeighedGradients
from lightning_dist.engine.pipeline.runtime import Links
from lightning_dist.engine.tensors.tree import flatten, unflatten


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Stands for a tensor.

    Attributes:
        size: Shape of the tensor.
        dtype: Dtype of the tensor.
        requires_grad: Whether the sender of the tensor wants a gradient.
    """

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> Tensor:
        """Creates a tensor of this shape."""
        made = torch.empty(self.size, dtype=self.dtype)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class DryMessage:
    """Stands for a tree of tensors.

    Attributes:
        shapes: Shapes of the tensors.
        skeleton: The tree without its tensors.
    """

    shapes: tuple[TensorShape, ...]
    skeleton: Any

    @classmethod
    def of(cls, tree: Any) -> DryMessage:
        """Creates the message of a tree, without the tree's values."""
        tensors, skeleton = flatten(tree)
        shapes = (TensorShape(t.shape, t.dtype, t.requires_grad) for t in tensors)
        return cls(tuple(shapes), skeleton)

    def make(self) -> Any:
        """Creates a tree of these shapes."""
        return unflatten([shape.make() for shape in self.shapes], self.skeleton)


Sent = Mapping[int, DryMessage]
"""The messages that a stage has sent, by tag."""


class DrySender:
    """Records the messages that are sent.

    Args:
        note: Called with the bytes of each message.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self.sent: dict[int, DryMessage] = {}
        self._note = note

    def send(self, tree: Any, *, tag: int = 0) -> None:
        """Records a tree."""
        self._note(sum(t.nbytes for t in flatten(tree)[0]))
        self.sent[tag] = DryMessage.of(tree)

    def close(self) -> None:
        """Does nothing."""


class DryReceiver:
    """Creates the tensors of a message when it is received.

    Args:
        find: Returns the message with a tag.
    """

    def __init__(self, find: Callable[[int], DryMessage]) -> None:
        self._find = find

    def receive(self, *, tag: int = 0) -> Any:
        """Creates the tree with a tag."""
        return self._find(tag).make()

    def interrupt(self, error: BaseException) -> None:
        """Does nothing: no receive waits."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class DryLinks:
    """The channels of a rank that is alone.

    Attributes:
        links: The links for the runtime.
        sent: Messages of each of the rank's stages to a stage of another rank, by tag.
    """

    links: Links
    sent: Mapping[int, Sent]

    @classmethod
    def of(
        cls,
        rank_of_stage: Sequence[int],
        rank: int,
        known: Mapping[int, Sent],
        note: Callable[[int], None],
    ) -> DryLinks:
        """Creates the channels of a rank.

        Args:
            rank_of_stage: The rank of each stage.
            rank: This rank in the pipeline.
            known: The messages of other ranks' stages to this rank's.
            note: Called with the bytes of each message to another rank.
        """
        activations = _DryActivations(known, note)
        gradients = _DryGradients(activations.sent, note)
        return cls(wire(rank_of_stage, rank, activations, gradients), activations.sent)


class _DryActivations:
    def __init__(self, known: Mapping[int, Sent], note: Callable[[int], None]) -> None:
        self.sent: dict[int, Sent] = {}
        self._known = known
        self._note = note

    def to(self, peer: int, stage: int) -> DrySender:
        sender = DrySender(self._note)
        self.sent[stage] = sender.sent
        return sender

    def of(self, peer: int, stage: int) -> DryReceiver:
        return DryReceiver(self._known[stage].__getitem__)


class _DryGradients:
    def __init__(self, sent: Mapping[int, Sent], note: Callable[[int], None]) -> None:
        self._sent = sent
        self._note = note

    def to(self, peer: int, stage: int) -> DrySender:
        return DrySender(self._note)

    def of(self, peer: int, stage: int) -> DryReceiver:
        """Creates a receiver of the gradients that ``stage`` would send back to the one before."""
        return DryReceiver(lambda tag: _gradient_of(self._sent[stage - 1][tag]))


def _gradient_of(activation: DryMessage) -> DryMessage:
    wanted = [shape for shape in activation.shapes if shape.requires_grad]
    return DryMessage.of(WeighedGradients([torch.empty(s.size, dtype=s.dtype) for s in wanted]))

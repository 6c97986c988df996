"""Channels to stages that do not exist: what is sent is noted, what is received has no values.

Ranks are tried one after the other. What a stage would send to the next is remembered as shapes.
From these the next one's activations are made, and the gradients that it would send back: one for
each tensor that requires grad, as large.
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
        size: Its shape.
        dtype: Its dtype.
        requires_grad: Whether its sender wants a gradient.
    """

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> Tensor:
        """Makes a tensor like it."""
        made = torch.empty(self.size, dtype=self.dtype)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class DryMessage:
    """Stands for a tree of tensors.

    Attributes:
        shapes: Of the tensors.
        skeleton: The rest.
    """

    shapes: tuple[TensorShape, ...]
    skeleton: Any

    @classmethod
    def of(cls, tree: Any) -> DryMessage:
        """Forgets the values of a tree.

        Args:
            tree: Any.
        """
        tensors, skeleton = flatten(tree)
        shapes = (TensorShape(t.shape, t.dtype, t.requires_grad) for t in tensors)
        return cls(tuple(shapes), skeleton)

    def make(self) -> Any:
        """Makes a tree like it."""
        return unflatten([shape.make() for shape in self.shapes], self.skeleton)


Sent = Mapping[int, DryMessage]
"""What a stage has sent, by port."""


class DrySender:
    """Remembers what is sent.

    Args:
        note: Told of the bytes of each message.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self.sent: dict[int, DryMessage] = {}
        self._note = note

    def send(self, tree: Any, *, port: int = 0) -> None:
        """Notes a tree."""
        self._note(sum(t.nbytes for t in flatten(tree)[0]))
        self.sent[port] = DryMessage.of(tree)

    def close(self) -> None:
        """Does nothing."""


class DryReceiver:
    """Makes what was sent, when it is received.

    Args:
        find: Gives the message of a port.
    """

    def __init__(self, find: Callable[[int], DryMessage]) -> None:
        self._find = find

    def receive(self, *, port: int = 0) -> Any:
        """Makes the tree of a port."""
        return self._find(port).make()

    def interrupt(self, error: BaseException) -> None:
        """Does nothing: nobody waits."""

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class DryLinks:
    """The channels of a rank that is alone.

    Attributes:
        links: For the runtime.
        sent: What each stage of the rank has sent to one of another rank, by port.
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
        """Makes them.

        Args:
            rank_of_stage: The rank of each stage.
            rank: This one, in the pipeline.
            known: What other ranks' stages send to this one's.
            note: Told of the bytes of each message to another rank.
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
        """Receives what the stage after would send back for what the one before has sent it."""
        return DryReceiver(lambda port: _gradient_of(self._sent[stage - 1][port]))


def _gradient_of(activation: DryMessage) -> DryMessage:
    wanted = [shape for shape in activation.shapes if shape.requires_grad]
    return DryMessage.of(WeighedGradients([torch.empty(s.size, dtype=s.dtype) for s in wanted]))

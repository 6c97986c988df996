"""Channels to stages that do not exist: what is sent is noted, what is received has no values.

Stages are tried one after the other. What one would send to the next is remembered as shapes. From
these the next one's activations are made, and the gradients that it would send back: one for each
tensor that requires grad, as large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dist.pipeline.loss_weights import WeighedGradients
from lightning_dist.pipeline.runtime import Links
from lightning_dist.tree import flatten, unflatten


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

    def send(self, tree: Any, *, port: int = 0, stamp: int = 0) -> None:
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

    def receive(self, *, port: int = 0, stamp: int = 0) -> Any:
        """Makes the tree of a port."""
        return self._find(port).make()

    def interrupt(self, error: BaseException) -> None:
        """Does nothing: nobody waits."""

    def close(self) -> None:
        """Does nothing."""


def dry_links(
    stage: int, received: Sent | None, sender: DrySender | None, note: Callable[[int], None]
) -> Links:
    """Makes the channels of a rank that is alone and has one stage.

    Args:
        stage: The stage.
        received: What the stage before has sent, by port; None if there is none.
        sender: To the stage after; None if there is none.
        note: Told of the bytes of each gradient that this stage sends.
    """
    links = Links()
    if received is not None:
        links.activations_in[stage] = DryReceiver(received.__getitem__)
        links.gradients_out[stage] = DrySender(note)
    if sender is not None:
        links.activations_out[stage] = sender
        links.gradients_in[stage] = DryReceiver(lambda port: _gradient_of(sender.sent[port]))
    return links


def _gradient_of(activation: DryMessage) -> DryMessage:
    wanted = [shape for shape in activation.shapes if shape.requires_grad]
    return DryMessage.of(WeighedGradients([torch.empty(s.size, dtype=s.dtype) for s in wanted]))

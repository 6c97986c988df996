"""Channels to stages that do not exist: what is sent is noted, what is received has no values.

Stages are tried one after the other. What one would send to the next is remembered as shapes. From
these the next one's activations are made, and the gradients that it would send back: one for each
tensor that requires grad, as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

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


class DrySender:
    """Remembers what is sent.

    Args:
        note: Told of the bytes of each message.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self.sent: list[DryMessage] = []
        self._note = note

    def send(self, tree: Any, stamp: int = 0) -> None:
        """Notes a tree."""
        self._note(sum(t.nbytes for t in flatten(tree)[0]))
        self.sent.append(DryMessage.of(tree))

    def close(self) -> None:
        """Does nothing."""


class DryReceiver:
    """Makes what was sent, and asks for it when it is received.

    Args:
        messages: In order.
    """

    def __init__(self, messages: Iterable[DryMessage]) -> None:
        self._messages = iter(messages)

    def receive(self, stamp: int = 0) -> Any:
        """Makes the next tree."""
        return next(self._messages).make()

    def interrupt(self, error: BaseException) -> None:
        """Does nothing: nobody waits."""

    def close(self) -> None:
        """Does nothing."""


def dry_links(
    received: Sequence[DryMessage] | None, sender: DrySender | None, note: Callable[[int], None]
) -> Links:
    """Makes the channels of a stage that is alone.

    Args:
        received: What the stage before has sent; None if there is none.
        sender: To the stage after; None if there is none.
        note: Told of the bytes of each gradient that this stage sends.
    """
    return Links(
        activations_in=None if received is None else DryReceiver(received),
        activations_out=sender,
        gradients_in=None if sender is None else DryReceiver(_gradients_for(sender)),
        gradients_out=None if received is None else DrySender(note),
    )


def _gradients_for(sender: DrySender) -> Iterator[DryMessage]:
    # Each schedule runs the backwards in the order of the forwards, which go on meanwhile.
    for index in count():
        wanted = [shape for shape in sender.sent[index].shapes if shape.requires_grad]
        yield DryMessage.of([torch.empty(s.size, dtype=s.dtype) for s in wanted])

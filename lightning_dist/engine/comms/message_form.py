"""What messages of a channel have in common.

A transport that fixes its shapes from the first micro-batch gives silently wrong gradients for
uneven ones. Here each message may differ from the one before. By the socket a form goes ahead of
the first that differs; in shared memory each packet has its form with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dist.engine.comms.packet import TensorInfo
from lightning_dist.engine.comms.shared_ring import Offer


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What the next messages are like.

    Attributes:
        content: Pickled: the tree without its tensors, and what these are.
        offer: Of shared memory, if there is any.
    """

    content: bytes
    offer: Offer | None = None


def content_of(skeleton: Any, infos: Sequence[TensorInfo]) -> bytes:
    """Gives the content of a form.

    Args:
        skeleton: A tree without its tensors.
        infos: What these are.
    """
    return pickle.dumps((skeleton, list(infos)))


def read_content(content: bytes) -> tuple[Any, list[TensorInfo]]:
    """Gives a tree without its tensors, and what these are.

    Args:
        content: Of a form.
    """
    found: tuple[Any, list[TensorInfo]] = pickle.loads(content)
    return found


NO_FORM = MessageForm(content_of(None, []))
"""What each end of a new channel takes for granted."""

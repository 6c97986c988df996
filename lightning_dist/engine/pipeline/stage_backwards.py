"""The backwards of a stage, as FSDP2 has to see them.

FSDP2 learns of a backward from hooks on what its root has returned, and when it is over reduces
what autograd has added to the gathered parameters. The last one of a round shall do that, the
others not.

Where a schedule parts backwards, autograd goes from the middle of the graph to the weights, past
those hooks, and nobody would tell FSDP2. So the root gets one more method that FSDP2 takes for a
forward. What it returns depends on no parameter, and its backward is over at once; behind it FSDP2
does what it does behind each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_dist.engine.sharding.sharding import unshard

_EMPTY_FORWARD = "forward_of_nothing"


class StageBackwards:
    """What runs around the backwards of one stage.

    Args:
        root: Runs the stage's layers; sharded or not.
        context: Gives what each runs in.
        sends: Whether gradients shall be reduced in this round at all.
    """

    def __init__(
        self,
        root: nn.Module,
        context: Callable[[], AbstractContextManager[None]],
        sends: Callable[[], bool],
    ) -> None:
        self._root = root
        self._context = context
        self._sends = sends
        if not hasattr(root, _EMPTY_FORWARD):  # an earlier run of the same model has made it
            setattr(root, _EMPTY_FORWARD, _nothing)
            register_fsdp_forward_method(root, _EMPTY_FORWARD)

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Wraps a backward.

        Args:
            is_last: Whether no other one of the round comes behind it.

        Yields:
            Nothing.
        """
        self._announce(is_last=is_last)
        with self._context():
            yield

    @contextmanager
    def part(self) -> Iterator[None]:
        """Wraps a part of a backward; nothing is reduced behind it.

        Yields:
            Nothing.
        """
        self._announce(is_last=False)
        unshard(self._root)  # a forward of another micro-batch may have freed them
        with self._context():
            yield

    def end_parts(self, *, is_last: bool) -> None:
        """Lets FSDP2 see gradients that have been added to the gathered parameters.

        Args:
            is_last: Whether no other backward of the round comes.
        """
        if isinstance(self._root, FSDPModule):
            self._announce(is_last=is_last)
            torch.autograd.backward(getattr(self._root, _EMPTY_FORWARD)())

    def _announce(self, *, is_last: bool) -> None:
        if isinstance(self._root, FSDPModule):
            self._root.set_is_last_backward(is_last)
            self._root.set_reshard_after_backward(is_last)
            self._root.set_requires_gradient_sync(is_last and self._sends())


def _nothing() -> Tensor:
    return torch.zeros((), requires_grad=True)

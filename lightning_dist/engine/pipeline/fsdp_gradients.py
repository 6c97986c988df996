"""A stage's gradients in ``p.grad`` for a round, where others listen.

FSDP2 reduces what has been added to a parameter when a backward has passed it, so gradients must be
there, and whoever shards must know which backward is the last. What earlier rounds have left for
the same update is set aside meanwhile.

The backwards of a stage, as FSDP2 has to see them.

FSDP2 learns of a backward from hooks on what its root has returned, and when it is over reduces
what autograd has added to the gathered parameters. The last one of a round shall do that, the
others not.

Where a schedule parts backwards, autograd goes from the middle of the graph to the weights, past
those hooks, and nobody would tell FSDP2. So the root gets one more method that FSDP2 takes for a
forward. What it returns depends on no parameter, and its backward is over at once; behind it FSDP2
does what it does behind each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_dist.engine.pipeline.gradients import Backward, have_shared_memory
from lightning_dist.engine.sharding.fully_shard import unshard


class Listener(Protocol):
    """Who wants to know of each backward of a stage, and which one is the last of its round."""

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gives what a backward runs in.

        Args:
            is_last: Whether no other one of the round comes behind it.
        """

    def part(self) -> AbstractContextManager[None]:
        """Gives what a part of a backward runs in, which goes by where others listen."""

    def end_parts(self, *, is_last: bool) -> None:
        """Notes that gradients have been added to ``p.grad`` in parts.

        Args:
            is_last: As for :meth:`backward`.
        """


def _look_away(_: Sequence[Tensor]) -> None:
    """Does nothing."""


class ParamGradAccumulator:
    """Gradients in ``p.grad``; see :class:`.Gradients`.

    Args:
        layers: The stage's.
        listener: Of the stage.
        look: Called with the outputs of each whole backward before it runs.
    """

    runs_hooks = True

    def __init__(
        self,
        layers: nn.Module,
        listener: Listener,
        look: Callable[[Sequence[Tensor]], None] = _look_away,
    ) -> None:
        self._look = look
        self._held: dict[str, Tensor] = {}
        self._layers = layers
        self._listener = listener
        self._num_left = 0
        self._before: dict[str, Tensor | None] = {}

    def begin_round(self, num_backwards: int) -> None:
        """Sets the gradients of earlier rounds aside."""
        self._num_left = num_backwards
        self._before = {name: p.grad for name, p in self._parameters()}
        for _, parameter in self._parameters():
            parameter.grad = None

    def end_round(self) -> None:
        """Takes the gradients of this round, and puts those of earlier ones back."""
        assert self._num_left == 0
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                self._held[name] = parameter.grad
            parameter.grad = self._before.pop(name)

    def held(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients."""
        return self._held

    def take(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients away."""
        held, self._held = self._held, {}
        return held

    @contextmanager
    def parting(self, parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Gives the parameters that are heard there, whatever has been made of them for a graph."""
        with self._listener.part():
            yield dict(self._parameters())

    @contextmanager
    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> Iterator[None]:
        """Leaves what autograd adds where it is, and says so."""
        self._num_left -= 1
        with self._listener.part():
            yield
        self._keep_from(given)
        self._listener.end_parts(is_last=self._num_left == 0)

    def clear(self) -> None:
        """Drops what is held and what was set aside."""
        self._held.clear()
        self._before.clear()

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        """Runs one backward."""
        self._num_left -= 1
        if outputs:
            self._look(outputs)
            with self._listener.backward(is_last=self._num_left == 0):
                backward(outputs, gradients)
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        self._keep_from([*gradients, *found])
        return found

    def _keep_from(self, others: Sequence[Tensor | None]) -> None:
        """Copies gradients that others would see change."""
        parameters = [parameter for _, parameter in self._parameters()]
        are_shared = have_shared_memory([p.grad for p in parameters], others)
        for parameter, is_shared in zip(parameters, are_shared, strict=True):
            if is_shared:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._layers.named_parameters() if p.requires_grad]


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

"""Where a stage's gradients are between the backwards of a round and the optimizer.

The backwards run inside of the user's step, before the training loop clears ``p.grad``, so their
gradients wait in ``held`` until the loop asks for them.

Autograd can hand gradients over in two ways. :class:`Returned` asks for them as values, which
leaves the parameters alone: an asynchronous stage differentiates by versions of its weights that
are no parameters. :class:`Accumulated` lets autograd add to ``p.grad``, for others listen there:
FSDP2 reduces what has been added to a parameter when the backward has passed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class Gradients(Protocol):
    """Runs the backwards of one stage and holds what they bring, by update."""

    def begin_round(self, num_backwards: int) -> None:
        """Prepares for a number of backwards after which the gradients are wanted."""

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
    ) -> list[Tensor | None]:
        """Runs one backward.

        Args:
            outputs: Roots of the graph.
            gradients: One for each of them.
            inputs: Leaves that are no parameters.
            parameters: What stands for the stage's trainable parameters in this graph.
            update: What their gradients are for.

        Returns:
            One gradient for each input.
        """

    def add(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor | None], update: int
    ) -> None:
        """Holds the gradients of a backward that was run elsewhere.

        Args:
            parameters: What stands for the stage's trainable parameters in its graph.
            gradients: One for each of them, or None.
            update: What they are for.
        """

    def end_round(self) -> None:
        """Makes what is held complete."""

    def held(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients for an update by parameter name; they stay here.

        Args:
            update: Which.
        """

    def take(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients for an update by parameter name, away.

        Args:
            update: Which.
        """

    def clear(self) -> None:
        """Drops everything, after a failure."""


class Returned:
    """Gradients as values.

    Args:
        dtype: What they become before they are added up; None leaves their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: dict[int, dict[str, Tensor]] = {}

    def begin_round(self, num_backwards: int) -> None:
        """Does nothing."""

    def end_round(self) -> None:
        """Does nothing."""

    def held(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients for an update; see :class:`Gradients`."""
        return self._held.get(update, {})

    def take(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients for an update away; see :class:`Gradients`."""
        return self._held.pop(update, {})

    def clear(self) -> None:
        """Drops what is held."""
        self._held.clear()

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
    ) -> list[Tensor | None]:
        """Runs one backward; see :class:`Gradients`."""
        sources = [*inputs, *parameters.values()]
        results: Sequence[Tensor | None] = [None] * len(sources)
        if outputs and sources:
            results = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        self._hold(parameters, results[len(inputs) :], [*gradients, *results], update)
        return list(results[: len(inputs)])

    def add(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor | None], update: int
    ) -> None:
        """Holds gradients from elsewhere; see :class:`Gradients`."""
        self._hold(parameters, gradients, gradients, update)

    def _hold(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
        everything: Sequence[Tensor | None],
        update: int,
    ) -> None:
        held = self._held.setdefault(update, {})
        # autograd may return one tensor for several sources (y = a + b); what is held gets added
        # to and clipped in place, so it must be nobody else's.
        users = Counter(_memory_of(t) for t in everything if t is not None)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            if gradient is None:
                continue
            dtype = self._dtype or gradient.dtype
            if name in held:
                held[name].add_(gradient)
            elif users[_memory_of(gradient)] > 1 or gradient.stride() != parameter.stride():
                held[name] = torch.empty_like(parameter, dtype=dtype).copy_(gradient).detach()
            else:
                held[name] = gradient.to(dtype)


class Accumulated:
    """Gradients where autograd adds them up.

    Args:
        layers: The stage's.
        around: Gives what a backward runs in; is told whether it is the last one of its round.
    """

    def __init__(
        self, layers: nn.Module, around: Callable[[bool], AbstractContextManager[None]]
    ) -> None:
        self._held: dict[str, Tensor] = {}
        self._layers = layers
        self._around = around
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
        """Gives the gradients; see :class:`Gradients`."""
        return self._held

    def take(self, update: int) -> dict[str, Tensor]:
        """Gives the gradients away; see :class:`Gradients`."""
        held, self._held = self._held, {}
        return held

    def add(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor | None], update: int
    ) -> None:
        """Adds gradients from elsewhere; see :class:`Gradients`."""
        raise NotImplementedError

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
    ) -> list[Tensor | None]:
        """Runs one backward; see :class:`Gradients`."""
        self._num_left -= 1
        if outputs:
            with self._around(self._num_left == 0):
                torch.autograd.backward(outputs, gradients)
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        return found

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._layers.named_parameters() if p.requires_grad]


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

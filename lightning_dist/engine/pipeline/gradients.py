"""Where a stage's gradients are between the backwards of a round and the optimizer.

The backwards run inside of the user's step, before the training loop clears ``p.grad``, so their
gradients wait in ``held`` until the loop asks for them.

Autograd adds to the ``grad`` of leaves, while a gradient is in the cache and nothing else has been
made of memory for it; to ask for values and add these later is slower. :class:`HeldGradients` lends
what is held to the leaves for each backward, which an asynchronous stage differentiates by versions
of its weights that are no parameters. Where others listen to parameters,
:class:`.ParamGradAccumulator` leaves it in ``p.grad`` for a round.

Autograd gives a leaf what arrives there, without a copy, where nothing else holds that tensor; it
does not ask what else has its memory. The gradient of ``p`` in ``x + p[None]`` is a view of what
the stage behind has sent, and so is that of ``x``, which goes to the stage before. Whatever is
added to the one later would change the other on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from lightning_dist.engine.tensors.dtensor import local_part


def have_shared_memory(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[bool]:
    """Tells for each of some gradients whether its memory is that of another tensor, too.

    Args:
        gradients: Compared with each other, and with the others.
        others: Only compared with.
    """
    users = Counter(_memory_of(tensor) for tensor in (*gradients, *others) if tensor is not None)
    return [g is not None and users[_memory_of(g)] > 1 for g in gradients]


def _memory_of(tensor: Tensor) -> object:
    # A storage is the same object for all tensors in it, as long as one reference to it is held;
    # an address would be none where tensors have no values.
    return tensor if tensor.is_sparse else local_part(tensor).untyped_storage()


Backward = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Gradients(Protocol):
    """Runs the backwards of one stage and holds what they bring, by update.

    Attributes:
        runs_hooks: Whether autograd runs the parameters' hooks in each backward; else they are to
            be run once for each batch.
    """

    runs_hooks: bool

    def begin_round(self, num_backwards: int) -> None:
        """Prepares for a number of backwards after which the gradients are wanted.

        Args:
            num_backwards: Calls of :meth:`run` and of :meth:`adding` that will come.
        """

    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        """Runs one backward.

        Args:
            outputs: Roots of the graph.
            gradients: One for each of them.
            inputs: Leaves that are no parameters.
            parameters: What stands for the stage's trainable parameters in this graph.
            update: What their gradients are for.
            backward: Has autograd run from the roots, with what layers need that compute again.

        Returns:
            One gradient for each input.
        """

    def parting(
        self, parameters: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Gives what the inputs' part of a backward runs in, and there the leaves of its graph.

        Args:
            parameters: As for :meth:`run`.
        """

    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> AbstractContextManager[None]:
        """Gives what the weights' part runs in, which adds to the ``grad`` of those leaves.

        Args:
            parameters: As for :meth:`run`.
            given: What that part begins with, which others may hold.
            update: What the gradients are for.
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


class HeldGradients:
    """Gradients that are in the leaves of a graph while a backward adds to them.

    Args:
        dtype: What they become before they are added up; None leaves their own.
    """

    runs_hooks = False

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
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        """Runs one backward; see :class:`Gradients`."""
        with (
            _in_leaves(inputs, [None] * len(inputs)) as of_inputs,
            _in_leaves([*parameters.values()], self._to_lend(parameters, update)) as found,
        ):
            if outputs:
                backward(outputs, gradients)
        self._take_back(parameters, found, [*gradients, *of_inputs], update)
        return of_inputs

    def parting(
        self, parameters: Mapping[str, Tensor]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Gives the same parameters; see :class:`Gradients`."""
        return nullcontext(parameters)

    @contextmanager
    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> Iterator[None]:
        """Lends what is held; see :class:`Gradients`."""
        with _in_leaves([*parameters.values()], self._to_lend(parameters, update)) as found:
            yield
        self._take_back(parameters, found, given, update)

    def _to_lend(self, parameters: Mapping[str, Tensor], update: int) -> list[Tensor | None]:
        if self._dtype is not None:  # autograd adds what is of the leaf's own only
            return [None] * len(parameters)
        return [self.held(update).get(name) for name in parameters]

    def _take_back(
        self,
        parameters: Mapping[str, Tensor],
        found: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
        update: int,
    ) -> None:
        lent = self._to_lend(parameters, update)
        new = [None if g is before else g for g, before in zip(found, lent, strict=True)]
        for name, before, sum_of_both in zip(parameters, lent, new, strict=True):
            if before is not None and sum_of_both is not None:
                # autograd has not added in place: it was sparse, the other is not
                del self._held[update][name]
        self._hold(parameters, new, others, update)

    def _hold(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
        update: int,
    ) -> None:
        held = self._held.setdefault(update, {})
        # What is held gets added to and clipped in place, so it must be nobody else's.
        are_shared = have_shared_memory(gradients, others)
        rows = zip(parameters.items(), gradients, are_shared, strict=True)
        for (name, parameter), gradient, is_shared in rows:
            if gradient is None:
                continue
            dtype = self._dtype or gradient.dtype
            if name in held:
                held[name].add_(gradient)
            elif is_shared or not _is_laid_out_as(parameter, gradient):
                held[name] = torch.empty_like(parameter, dtype=dtype).copy_(gradient).detach()
            else:
                held[name] = gradient.to(dtype)


@contextmanager
def _in_leaves(
    leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterator[list[Tensor | None]]:
    """Puts gradients into leaves, and what was there before back at the end.

    Args:
        leaves: Of a graph.
        gradients: One for each of them, or None.

    Yields:
        A list that at the end has what has become of them.
    """
    found: list[Tensor | None] = []
    before = [leaf.grad for leaf in leaves]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    try:
        yield found
        found.extend(leaf.grad for leaf in leaves)
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def _is_laid_out_as(parameter: Tensor, gradient: Tensor) -> bool:
    return gradient.is_sparse or gradient.stride() == parameter.stride()
